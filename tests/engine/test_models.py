"""Tiny models in every engine mode: the same tokens as the dense reference.

``test_model_matrix.py`` tries more models in one mode.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support import engines, models
from support.dense import DenseModel
from support.model_matrix import FORMATS

from kvq_kernels import Format

NEW_TOKENS = 40
LENGTHS = [10, 64, 127, 128, 129, 256, 300, 400]


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    text = [rng.randrange(3, models.TINY_VOCABULARY) for _ in range(800)]
    return [text[:n] if n % 2 else text[300 : 300 + n] for n in LENGTHS]


def run(model: Path, name: str, **options: Any) -> list[list[int]]:
    with engines.engine(model, kv_cache_dtype=name, skip_tokenizer_init=True, **options) as llm:
        return engines.generate(llm, prompts(), NEW_TOKENS)


def mismatches(model: Path, fmt: Any, tokens: list[list[int]]) -> int:
    return DenseModel(model, fmt).judge(prompts(), tokens).mismatches


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 64, "max_num_seqs": 16},
        {"disable_hybrid_kv_cache_manager": True},
        {"poisoned": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_sliding_windows_whatever_the_engine_does(
    gemma3: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options == {"poisoned": True}:
        engines.poison_cache(monkeypatch)
        options = {"max_num_batched_tokens": 97, "max_num_seqs": 16}
    with engines.engine(
        gemma3, kv_cache_dtype="kvq-int4", skip_tokenizer_init=True, **options
    ) as llm:
        for _ in range(2):  # the second time with prefix hits, where that is on
            tokens = engines.generate(llm, prompts(), NEW_TOKENS)
            assert mismatches(gemma3, Format.create("kvq-int4", 64), tokens) == 0
        if "enable_prefix_caching" in options:
            assert engines.metric(llm, "vllm:prefix_cache_hits") > 0


def test_sliding_windows_preempted(gemma3: Path) -> None:
    """Four requests fit while each layer has one page of them, and not when it has two."""
    inputs = [prompt[:n] for prompt, n in zip(prompts()[4:], (110, 115, 120, 127), strict=True)]
    layer_groups = 3  # two layers each: full attention, and twice sliding windows
    pages_and_ring = layer_groups * (1 + 8)
    with engines.engine(
        gemma3,
        kv_cache_dtype="kvq-int4",
        skip_tokenizer_init=True,
        max_model_len=512,
        additional_config={"kvq": {"unit_size": 128}},
        num_gpu_blocks_override=4 * pages_and_ring + 4,
    ) as llm:
        tokens = engines.generate(llm, inputs, NEW_TOKENS)
        assert engines.metric(llm, "vllm:num_preemptions") > 0
    reference = DenseModel(gemma3, Format.create("kvq-int4", 64, 128))
    assert reference.judge(inputs, tokens).mismatches == 0


@pytest.mark.parametrize("skipped", [["0"], ["2"], ["0", "1"]], ids=" ".join)
def test_skipped_layers_stay_unquantised(
    llama: Path, skipped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.poison_cache(monkeypatch)  # with what a block's earlier owner may have left there
    tokens = run(llama, "kvq-int4", kv_cache_dtype_skip_layers=skipped)
    fmt = Format.create("kvq-int4", 64)
    assert mismatches(llama, lambda m: None if str(m.layer_idx) in skipped else fmt, tokens) == 0
    assert mismatches(llama, fmt, tokens) > 0


def test_skipping_sliding_window_layers(gemma3: Path) -> None:
    tokens = run(gemma3, "kvq-int4", kv_cache_dtype_skip_layers=["sliding_window"])
    fmt = Format.create("kvq-int4", 64)
    assert mismatches(gemma3, lambda m: None if m.is_sliding else fmt, tokens) == 0


@pytest.mark.parametrize("unit_size", [64, 128])
def test_other_unit_sizes(llama: Path, unit_size: int) -> None:
    sizes = {"unit_size": unit_size, "key_group_size": 32}
    tokens = run(llama, "kvq-int4", additional_config={"kvq": sizes})
    assert mismatches(llama, Format.create("kvq-int4", 64, unit_size, 32), tokens) == 0
    assert mismatches(llama, Format.create("kvq-int4", 64), tokens) > 0


def assert_quantised_up_to_a_tie(llama: Path, tokens: list[list[int]]) -> None:
    """Sums in another order round a key to another code now and then, and may tip one choice."""
    quantised = mismatches(llama, Format.create("kvq-int4", 64), tokens)
    unquantised = mismatches(llama, None, tokens)
    assert quantised <= 1
    assert unquantised > 4 * quantised, (quantised, unquantised)


def test_compiled(llama: Path) -> None:
    tokens = run(llama, "kvq-int4", enforce_eager=False)
    assert_quantised_up_to_a_tie(llama, tokens)


def test_tensor_parallel(llama: Path, two_workers: None) -> None:
    tokens = run(llama, "kvq-int4", tensor_parallel_size=2)
    assert_quantised_up_to_a_tie(llama, tokens)


def test_bfloat16_runs_the_same_chunked_or_not(llama: Path) -> None:
    once = run(llama, "kvq-int4", dtype="bfloat16")
    chunked = run(llama, "kvq-int4", dtype="bfloat16", max_num_batched_tokens=97, max_num_seqs=16)
    # bf16 matrix products depend on the number of rows, so near ties may fall either way.
    same = sum(
        a == b for x, y in zip(once, chunked, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert same > 0.8 * NEW_TOKENS * len(LENGTHS)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_can_be_reloaded(llama: Path, name: str) -> None:
    with engines.engine(llama, kv_cache_dtype=name, skip_tokenizer_init=True) as llm:
        before = engines.generate(llm, prompts(), NEW_TOKENS)
        llm.collective_rpc("reload_weights")
        assert engines.generate(llm, prompts(), NEW_TOKENS) == before
