"""vLLM with the Triton kernels in the interpreter, on both of its model runners.

The oracle is the same engine with the reference kernels, whose tokens tests/engine compares with
a dense model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import interpreted_engine, models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_tokens_equal_those_of_the_reference_kernels(runner: str, llama: Path) -> None:
    tests = Path(interpreted_engine.__file__).parent.parent
    path = os.pathsep.join(filter(None, [f"{tests}", f"{tests.parent}", os.getenv("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, interpreted_engine.__file__, runner, llama],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout.splitlines()[-1])
    for name, tokens in results.items():
        assert tokens["triton"] == tokens["reference"], name
        assert [len(t) for t in tokens["triton"]] == [interpreted_engine.NEW_TOKENS] * len(
            interpreted_engine.LENGTHS
        )
