"""Everything here starts vLLM engines."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make engines with two workers possible: on one NUMA node, one such engine at a time.

    Those of two test processes, started in the same moment, get in each other's way.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with (Path(tempfile.gettempdir()) / "kvq-two-workers.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
