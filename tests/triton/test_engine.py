"""vLLM with the Triton kernels in the interpreter, on both of its model runners.

The oracle is the same engine with the reference kernels, whose tokens tests/engine compares with
a dense model. Drafters on model runner V2 are here too, because it consists of Triton kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import interpreted_drafters, interpreted_engine, models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"))


def results_of(program: ModuleType, *arguments: str | Path) -> dict[str, Any]:
    """Run a program in a process of its own and return what it printed."""
    tests = Path(interpreted_engine.__file__).parent.parent
    path = os.pathsep.join(filter(None, [f"{tests}", f"{tests.parent}", os.getenv("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(program.__file__), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_tokens_equal_those_of_the_reference_kernels(runner: str, llama: Path) -> None:
    for name, tokens in results_of(interpreted_engine, runner, llama).items():
        assert tokens["triton"] == tokens["reference"], name
        assert [len(t) for t in tokens["triton"]] == [interpreted_engine.NEW_TOKENS] * len(
            interpreted_engine.LENGTHS
        )


def test_drafters_on_runner_v2(llama: Path, tmp_path: Path) -> None:
    results = results_of(interpreted_drafters, llama, models.tiny_eagle(tmp_path / "eagle"))
    plain, itself, eagle, unquantised = results.values()
    for result in (itself, eagle, unquantised):
        assert result["tokens"] == plain["tokens"]
    # Both caches follow the same rule. The last drafts of a request may go beyond its last token.
    most = interpreted_drafters.DRAFTS * len(interpreted_drafters.LENGTHS)
    assert itself["proposed"] - itself["accepted"] <= most
    assert itself["accepted"] > 0.75 * itself["proposed"]
    # The head is random, so no draft is accepted: compare what it drafts.
    assert eagle["proposed"] > 10 * eagle["accepted"]
    drafts, expected = (torch.tensor(result["drafts"]) for result in (eagle, unquantised))
    assert drafts.numel() == most
    # One that differs changes those after it. Of wrong pages' drafts hardly any would be equal.
    assert (drafts == expected).any(dim=1).all()
