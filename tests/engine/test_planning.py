"""``kvq plan`` against what running engines report, to the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import models
from support.engines import engine, scheduler

from kvq_vllm.planning import Plan, plan, read_model

CONTEXT = 2048
BATCHED_TOKENS = 512


def _plan(folder: Path, **options: Any) -> Plan:
    return plan(
        replace(read_model(folder), dtype="float32"),  # as the engines of the tests
        cache_memory=1 << 30,  # VLLM_CPU_KVCACHE_SPACE of the tests
        contexts=[CONTEXT],
        max_num_batched_tokens=BATCHED_TOKENS,
        use_vllm=True,
        **options,
    )


def _assert_equal(plan_: Plan, folder: Path, cache_dtype: str, **options: Any) -> None:
    planned = plan_.format(cache_dtype)
    assert planned.planned_by == "vllm", planned.problem
    with engine(
        folder,
        kv_cache_dtype=cache_dtype,
        max_model_len=CONTEXT,
        max_num_batched_tokens=BATCHED_TOKENS,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,  # as a server does by default; it needs more Mamba states
        **options,
    ) as llm:
        assert planned.num_blocks == scheduler(llm).kv_cache_config.num_blocks
        cache_config = llm.llm_engine.vllm_config.cache_config
        assert planned.at(CONTEXT).concurrency == cache_config.kv_cache_max_concurrency


# Grouped-query; windows and full attention; head size 256 and alternating windows; Mamba 2 beside
# attention. Not to the block: layers that differ in kv heads (Gemma 4), which the plan says.
@pytest.mark.parametrize(
    ("make", "cache_dtypes"),
    [
        (models.tiny_llama, ("auto", "kvq-k8v4")),
        (models.tiny_gemma3, ("auto", "kvq-int4")),
        (models.tiny_gemma2, ("kvq-int4",)),
        (models.tiny_granite_hybrid, ("auto", "kvq-int4")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_plan_is_what_an_engine_reports(
    make: Callable[[Path], Path], cache_dtypes: tuple[str, ...], tmp_path: Path
) -> None:
    folder = make(tmp_path)
    result = _plan(folder)
    for cache_dtype in cache_dtypes:
        _assert_equal(result, folder, cache_dtype)


def test_with_another_unit_size(tmp_path: Path) -> None:
    from kvq_vllm.config import KVQConfig

    folder = models.tiny_llama(tmp_path)
    options = {"kvq": {"unit_size": 64}}
    result = _plan(folder, options=KVQConfig.parse(options))
    _assert_equal(result, folder, "kvq-int4", additional_config=options)


@pytest.mark.parametrize("make", [models.tiny_llama, models.tiny_granite_hybrid])
def test_with_two_devices(make: Callable[[Path], Path], tmp_path: Path, two_workers: None) -> None:
    """One kv head each, half a state; the engine's figures are those of one device."""
    folder = make(tmp_path)
    result = _plan(folder, tensor_parallel_size=2)
    _assert_equal(result, folder, "kvq-int4", tensor_parallel_size=2)
