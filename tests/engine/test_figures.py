"""The figures that the README promises, by the scripts that measure them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import capacity, quality

SHAPE = capacity.SHAPE_8B


@pytest.fixture(scope="module")
def engine_tokens() -> dict[str, int]:
    rows = [row for d in capacity.DTYPES for row in capacity.in_own_process("engine", d)]
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
    rows = [row for d in capacity.DTYPES for row in capacity.in_own_process("planned", d)]
    return {row.cache_dtype: row.tokens for row in rows if row.max_model_len == 32768}


@pytest.mark.parametrize(
    ("name", "gain"), [("kvq-int4", 3.5), ("kvq-k8v4", 2.35), ("kvq-int8", 1.85), ("kvq-fp8", 1.99)]
)
def test_capacity_planned_for_8b_at_32k(
    planned_tokens: dict[str, int], name: str, gain: float
) -> None:
    assert planned_tokens[name] >= gain * planned_tokens["auto"]


@pytest.fixture(scope="module")
def measured_quality() -> dict[str, Any]:
    return {row.cache_dtype: row for row in quality.measure(quality.DTYPES, count=3)}


@pytest.mark.parametrize(
    ("name", "limit"), [("kvq-int4", 2.6e-3), ("kvq-k8v4", 1.3e-3), ("kvq-int8", 1e-4)]
)
def test_kl_to_the_unquantised_cache(
    measured_quality: dict[str, Any], name: str, limit: float
) -> None:
    row = measured_quality[name]
    assert row.positions >= 3000
    # The measure is a lower bound, about 4% below the divergence over the whole vocabulary.
    assert 0 < 1.05 * row.kl <= limit
    assert abs(row.delta_nll) < 0.01
