"""The figures that the README promises, by the scripts that measure them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import capacity
from kvq_kernels.formats import DEBUG_FORMAT
from tools.setup_env import CORPUS, MODEL


@pytest.fixture(scope="module")
def engine_tokens() -> dict[str, int]:
    rows = [capacity.engine_capacity_in_own_process(d) for d in capacity.DTYPES]
    assert {row.max_model_len for row in rows} == {8192}
    assert len({row.memory_bytes for row in rows}) == 1
    return {row.cache_dtype: row.tokens for row in rows}


@pytest.mark.parametrize(
    ("name", "gain"), [("kvq-int4", 3.3), ("kvq-k8v4", 2.2), ("kvq-int8", 1.8), ("kvq-fp8", 1.99)]
)
def test_capacity_that_an_engine_reports(
    engine_tokens: dict[str, int], name: str, gain: float
) -> None:
    assert engine_tokens[name] >= gain * engine_tokens["auto"]


@pytest.fixture(scope="module")
def planned_tokens() -> dict[str, int]:
    rows = capacity.planned_capacities()
    return {row.cache_dtype: row.tokens for row in rows if row.max_model_len == 32768}


@pytest.mark.parametrize(
    ("name", "gain"), [("kvq-int4", 3.5), ("kvq-k8v4", 2.35), ("kvq-int8", 1.85), ("kvq-fp8", 1.99)]
)
def test_capacity_planned_for_8b_at_32k(
    planned_tokens: dict[str, int], name: str, gain: float
) -> None:
    assert planned_tokens[name] >= gain * planned_tokens["auto"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``kvq eval`` on next-token prediction, with a format that is known to be bad."""
    options = {
        "formats": f"kvq-int8,kvq-k8v4,kvq-int4,{DEBUG_FORMAT}",
        "tasks": "next-token",
        "prompts": "3",
        "context": "1500",
        "dtype": "float32",
        "text": str(CORPUS),
        "out": str(tmp_path_factory.mktemp("quality")),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "kvq_vllm.cli", "eval", str(MODEL), *words, "--json"]
    environment = os.environ | {"KVQ_DEBUG_FORMATS": "1"}
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return {row["cache_dtype"]: row for row in json.loads(result.stdout)["formats"]}


@pytest.mark.parametrize(
    ("name", "limit"), [("kvq-int4", 2.2e-3), ("kvq-k8v4", 1.3e-3), ("kvq-int8", 1e-4)]
)
def test_kl_to_the_unquantised_cache(measured: dict[str, Any], name: str, limit: float) -> None:
    found = {f["criterion"]["name"]: f["estimate"]["mean"] for f in measured[name]["findings"]}
    # The measure is a lower bound, about 4% below the divergence over the whole vocabulary.
    assert 0 < 1.05 * found["KL divergence"] <= limit
    assert abs(found["ΔNLL of the text"]) < 0.01
    assert measured[name]["verdict"] == "safe"


def test_the_known_bad_is_found(measured: dict[str, Any]) -> None:
    assert measured[DEBUG_FORMAT]["verdict"] == "broken", measured[DEBUG_FORMAT]["reasons"]
