"""Faults of other quantised caches that no other test here would show; see docs/scenarios.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.one_layer import OneLayer, Setup
from support.paged import PagedCache, Sequence, random_sequence

from benchmarks import capacity
from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, cpu, reference
from kvq_vllm import plugin, scales
from kvq_vllm.backend import ResidualBackend, backend_for
from kvq_vllm.planning.engine import cache_config
from kvq_vllm.residual import residual_spec

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scenarios.md"
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


# --- the page --------------------------------------------------------------------------------


def test_every_test_that_the_page_names_exists() -> None:
    named = TEST.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 50
    defined = {path: functions_of(ROOT / path) for path, _ in named if (ROOT / path).exists()}
    missing = [f"{path}::{test}" for path, test in named if test not in defined.get(path, ())]
    assert missing == []


def test_every_row_of_the_page_has_a_test_or_a_reason() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.match(r"\| (?!Fault|---)", line)]
    assert len(rows) >= 34
    for row in rows:
        shown = row.strip("| ").split(" | ")[-1]
        assert TEST.search(shown) or len(shown.split()) >= 8, row


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# --- long contexts ---------------------------------------------------------------------------


def last_rows_by_the_rule(
    sequence: Sequence, fmt: Format, params: AttentionParams, start: int
) -> torch.Tensor:
    """Dense attention of the queries from `start` on, which lie in one unit."""
    unit = start // fmt.unit_size * fmt.unit_size
    sealed = reference.fake_quantise(sequence.key[:unit], sequence.value[:unit], fmt)
    key, value = (
        torch.cat([old, new[unit:]])
        for old, new in zip(sealed, (sequence.key, sequence.value), strict=True)
    )
    return reference.attention(sequence.query[start:], key, value, params, start, 0)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_long_prompt_in_chunks_and_drafts_behind_it(name: str) -> None:
    """vLLM 41726, 43357 and 52475: prompts beyond 4,096 tokens, drafts only past 8,192."""
    torch.manual_seed(0)
    fmt, params = Format.create(name, 16, unit_size=64), AttentionParams(scale=0.5)
    sequence = random_sequence(8250, 2, 1, 16)
    paged = PagedCache(fmt, 1, 1, 8250, 64, num_speculative_tokens=3, kernels=cpu)
    for end in [*range(512, 8193, 512), 8196, 8200]:
        new = end - sequence.computed
        (output,) = paged.step([sequence], [new], params)
        seen = Sequence(sequence.query[:end], sequence.key[:end], sequence.value[:end])
        first = end - min(new, 8)
        expected = last_rows_by_the_rule(seen, fmt, params, first)
        torch.testing.assert_close(output[first - end :], expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("name", SCHEMES)
def test_heads_do_not_depend_on_their_neighbours(name: str) -> None:
    """vLLM 23813: a device with some of the heads computes what one with all of them does."""
    torch.manual_seed(0)
    count = 32_800
    fmt, params = Format.create(name, 16, unit_size=64), AttentionParams(scale=0.5)
    sequence = random_sequence(count, 4, 2, 16)

    def decode(heads: slice, kv_heads: slice) -> torch.Tensor:
        torch.manual_seed(1)
        key, value = sequence.key[:, kv_heads], sequence.value[:, kv_heads]
        paged = PagedCache(fmt, 1, key.shape[1], count, 64)
        everything = Batch(torch.tensor([0, count]).int(), torch.tensor([count]).int())
        cpu.seal(key, value, paged.cache, everything)
        cpu.write_ring(key, value, paged.cache, everything)
        query = sequence.query[-1:, heads].contiguous()
        out = torch.empty_like(query)
        last = Batch(torch.tensor([0, 1]).int(), torch.tensor([count]).int())
        cpu.decode(query, paged.cache, last, params, out)
        return out

    together = decode(slice(None), slice(None))
    apart = [decode(slice(2 * i, 2 * i + 2), slice(i, i + 1)) for i in range(2)]
    assert torch.equal(together, torch.cat(apart, dim=1))


# --- memory ----------------------------------------------------------------------------------


def test_the_memory_profile_counts_the_largest_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 46767 and 40420: what a step allocates was seen while memory was measured."""
    asked, made = [], []

    class Kernels:
        @staticmethod
        def workspace_bytes(*sizes: Any) -> int:
            asked.append(sizes)
            return 12345

    layer = one_layer("kvq-int4")
    monkeypatch.setattr(layer.impl, "kernels", Kernels)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: made.append(size) or empty(*size, **kw))
    query = torch.zeros(3, 4, 16)
    layer.impl.forward(layer.layer, query, query, query, layer.pages, None, query)
    assert made == [(12345,)]
    config = layer.config
    assert asked == [
        (
            layer.impl.fmt,
            config.scheduler_config.max_num_seqs,
            1 + layer.setup.drafts,
            4,
            2,
            config.model_config.max_model_len + config.cache_config.block_size,
            torch.device("cpu"),
        )
    ]


def test_a_context_that_fits_only_when_quantised(tmp_path: Path) -> None:
    """vllm-metal 468: the check at start-up counts quantised bytes."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    capacity.write_model_config(tmp_path, capacity.SHAPE_8B)
    config = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, kv_cache_dtype="kvq-int4", max_model_len=8192
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "BLHNC"
    fmt = Format.create("kvq-int4", 128)
    sizes: dict[str, Any] = {"block_size": fmt.unit_size, "num_kv_heads": 8, "head_size": 128}
    pages = backend_for(fmt).customize_spec(FullAttentionSpec(dtype=torch.uint8, **sizes))
    ring = residual_spec(pages, fmt, torch.bfloat16, 0, pages.page_size_bytes)
    assert ResidualBackend.customize_spec(ring) is ring
    plain = FullAttentionSpec(dtype=torch.bfloat16, **sizes)
    memory = 16 << 20  # of one layer: 8,192 tokens in 16 bit take 32 MiB
    assert cache_config(config, {"layer": pages, "layer.kvq_residual": ring}, memory).num_blocks
    with pytest.raises(ValueError, match="8192"):
        cache_config(config, {"layer": plain}, memory)


# --- fp8 scales ------------------------------------------------------------------------------


def test_profiling_and_dummy_runs_leave_fp8_scales_alone() -> None:
    """vLLM 37554: scales frozen from the garbage of a dummy run."""
    layer = one_layer("kvq-fp8")
    before = layer.layer._k_scale.clone(), layer.layer._v_scale.clone(), layer.memory.clone()
    garbage = torch.full((5, 4, 16), 1e6)
    layer.impl.forward(
        layer.layer, garbage, garbage[:, :2], garbage[:, :2], layer.pages, None, garbage.clone()
    )
    assert torch.equal(layer.layer._k_scale, before[0])
    assert torch.equal(layer.layer._v_scale, before[1])
    assert torch.equal(layer.memory, before[2])


def test_vllms_copies_of_a_scale_agree_with_it() -> None:
    """PR 34863: the copy of a scale on the host stayed 1.0."""
    layer = one_layer("kvq-fp8").layer
    before = layer._k_scale.clone(), layer._v_scale.clone()
    try:
        scales._set_scales(layer, torch.tensor([0.25, 0.5]), torch.tensor([2.0]))
        assert layer._k_scale.tolist() == [0.25, 0.5]
        assert layer._v_scale.tolist() == [2.0, 2.0]
        assert (layer._k_scale_float, layer._v_scale_float) == (0.5, 2.0)
        assert (layer._k_scale_cpu.max().item(), layer._v_scale_cpu.max().item()) == (0.5, 2.0)
    finally:
        scales._set_scales(layer, *before)


def one_layer(cache_dtype: str) -> OneLayer:
    plugin.register()
    return OneLayer(Setup(cache_dtype, kernels="reference"))
