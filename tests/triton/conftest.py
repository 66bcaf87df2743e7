"""The Triton kernels' tests run in Triton's interpreter, on a CPU.

Triton decides when a kernel is defined whether it is interpreted, so the variable must be set
before anything imports Triton, and holds for the whole process. Hence `make test-triton`, and
hence `norecursedirs` in pyproject.toml: a plain `pytest` leaves this folder out.
"""

import os
import sys
from collections.abc import Iterator

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
elif os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("Triton was imported compiled: run `pytest tests/triton` on its own.")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The interpreter works on tensors of a few thousand elements: threads only cost time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
