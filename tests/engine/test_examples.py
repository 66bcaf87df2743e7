"""The examples run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import smollm2

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize("name", ["offline_llm.py", "server_client.py"])
def test_generation(name: str) -> None:
    result = run(name, str(smollm2()), "kvq-int4")
    assert result.returncode == 0, result.stderr
    assert "Tokyo" in result.stdout


def test_planning() -> None:
    result = run("plan_in_python.py", str(smollm2()), "700")
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout.splitlines()[-1] == "For 700 requests, serve with --kv-cache-dtype kvq-int4"
    )


def test_planning_for_too_much() -> None:
    result = run("plan_in_python.py", str(smollm2()), "100000")
    assert result.returncode == 1
    assert "100000 requests do not fit" in result.stderr
