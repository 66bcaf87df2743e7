"""The ring's size and who gets its blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from benchmarks import capacity
from kvq_kernels import SCHEMES, Format
from kvq_vllm.backend import ResidualBackend, backend_for
from kvq_vllm.planning.engine import cache_config
from kvq_vllm.residual import ResidualLayer, ResidualManager, ResidualSpec, residual_spec


def page_spec(fmt: Format, block_size: int, num_kv_heads: int = 8, window: int = 0) -> Any:
    sizes = {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": fmt.head_size,
        "dtype": torch.uint8,
    }
    spec = (
        SlidingWindowSpec(sliding_window=window, **sizes) if window else FullAttentionSpec(**sizes)
    )
    return backend_for(fmt).customize_spec(spec)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("unit_size", [64, 128, 256])
@pytest.mark.parametrize("name", SCHEMES)
def test_ring_shares_the_page_size_and_holds_a_unit_and_the_drafts(
    name: str, unit_size: int, head_size: int, dtype: torch.dtype
) -> None:
    fmt = Format.create(name, head_size, unit_size)
    for pages_per_block, drafts in ((1, 0), (1, 5), (2, 0), (4, 7)):
        pages = page_spec(fmt, unit_size * pages_per_block)
        ring = residual_spec(pages, fmt, dtype, drafts, pages.page_size_bytes)
        assert ring.page_size_bytes == pages.page_size_bytes
        assert pages.block_size % ring.block_size == 0
        assert ring.capacity >= unit_size + drafts
        assert ring.capacity - ring.block_size < unit_size + drafts
        used = ring.block_size * 2 * head_size * dtype.itemsize * 8
        assert used <= ring.page_size_bytes
        assert 2 * used > ring.page_size_bytes or 2 * ring.block_size > pages.block_size


@pytest.mark.parametrize("name", SCHEMES)
def test_pages_count_packed_bytes_with_and_without_a_window(name: str) -> None:
    fmt = Format.create(name, 128)
    unit = fmt.unit_size
    full, window = page_spec(fmt, unit), page_spec(fmt, unit, window=4096)
    assert full.page_size_bytes == window.page_size_bytes == 8 * fmt.record_bytes


def test_unquantised_specs_are_left_alone() -> None:
    spec = FullAttentionSpec(block_size=128, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    assert backend_for(Format.create("kvq-int4", 128)).customize_spec(spec) is spec
    assert ResidualBackend.customize_spec(spec) is spec


class _Pool:
    """Hands out blocks and counts them."""

    null_block = SimpleNamespace(block_id=0)

    def __init__(self) -> None:
        self.handed_out = 0

    def get_new_blocks(self, count: int) -> list[Any]:
        self.handed_out += count
        return [SimpleNamespace(block_id=self.handed_out - i) for i in range(count)]


def manager(ring_blocks: int, block_size: int) -> ResidualManager:
    spec = ResidualSpec(
        block_size=block_size,
        ring_blocks=ring_blocks,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.uint8,
        dcp_sharded=False,
    )
    return ResidualManager(
        spec,
        block_pool=_Pool(),
        enable_caching=True,
        kv_cache_group_id=1,
        scheduler_block_size=128,
    )


def test_blocks_are_claimed_as_the_request_grows_and_never_more_than_the_ring() -> None:
    residual = manager(ring_blocks=4, block_size=32)
    held = 0
    for num_tokens in (1, 32, 33, 100, 128, 129, 5000):
        needed = residual.get_num_blocks_to_allocate("a", num_tokens, (), 0, 0, num_tokens)
        new = residual.allocate_new_blocks("a", num_tokens, num_tokens)
        held += len(new)
        assert needed == len(new)
        assert held == min(4, -(-num_tokens // 32))
    assert residual.block_pool.handed_out == 4
    assert len(residual.req_to_blocks["a"]) == 4
    assert residual.get_num_blocks_to_allocate("b", 40, (), 0, 0, 40) == 2


def test_decode_of_500_tokens_keeps_the_ring_at_its_size() -> None:
    residual = manager(ring_blocks=4, block_size=32)
    for num_tokens in range(1, 501):
        residual.allocate_new_blocks("a", num_tokens, num_tokens)
    assert residual.block_pool.handed_out == 4


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_block_table_rows_are_wide_enough(runner: str) -> None:
    """V1 indexes the row by position // block_size for a slot mapping that nobody reads."""
    spec = manager(4, 32).kv_cache_spec
    config = SimpleNamespace(
        use_v2_model_runner=runner == "V2", model_config=SimpleNamespace(max_model_len=4096)
    )
    width = spec.max_num_blocks_per_req(config, 4096)
    assert width == (4 if runner == "V2" else 128)
    assert spec.max_memory_usage_bytes(config) == 4 * spec.page_size_bytes


def test_short_contexts_do_not_pay_for_a_whole_ring() -> None:
    spec = manager(4, 32).kv_cache_spec
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=40))
    assert spec.max_memory_usage_bytes(config) == 2 * spec.page_size_bytes


class _Owner:
    """An attention layer, as far as its companion asks."""

    dtype = torch.bfloat16

    def __init__(self, spec: Any, fmt: Format) -> None:
        self.spec, self.fmt = spec, fmt

    def get_attn_backend(self) -> Any:
        return backend_for(self.fmt)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


WINDOW = 512
SHAPES = {  # (kv heads, head size, window) per layer
    "uniform": [(2, 64, 0)] * 4,
    "2 and 4 kv heads": [(2, 64, 0), (4, 64, 0)] * 4,
    "2, 4 and 8 kv heads": [(4, 64, 0), (8, 64, 0), (8, 64, 0), (2, 64, 0), (8, 64, 0)],
    "3 and 4 kv heads": [(3, 64, 0), (4, 64, 0)] * 3,
    "30 of 8 and 6 of 4 kv heads": [(8, 128, 0)] * 30 + [(4, 128, 0)] * 6,
    "8 kv heads in windows, 4 without, 5:1": ([(8, 128, WINDOW)] * 5 + [(4, 128, 0)]) * 2,
    "D256 in windows, D128 without, 5:1": ([(4, 256, WINDOW)] * 5 + [(4, 128, 0)]) * 2,
}


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_vllm_can_plan_models_whose_layers_differ(
    planner_config: Any, shape: str, name: str, layout: str
) -> None:
    planner_config.cache_config.kv_cache_layout = layout
    layers = planner_config.compilation_config.static_forward_context
    layers.clear()
    specs = {}
    for i, (heads, head_size, window) in enumerate(SHAPES[shape]):
        fmt = Format.create(name, head_size)
        owner = _Owner(page_spec(fmt, 128, heads, window), fmt)
        layers[f"model.layers.{i}.attn.kvq_residual"] = ResidualLayer(owner, fmt, ResidualBackend)
        specs[f"model.layers.{i}.attn"] = owner.spec
    specs |= {name: layer.get_kv_cache_spec(planner_config) for name, layer in layers.items()}
    plan = cache_config(planner_config, specs, 4 << 30)
    planned = [name for group in plan.kv_cache_groups for name in group.layer_names]
    assert sorted(planned) == sorted(specs)
    assert len({specs[name].page_size_bytes for name in layers}) == 1


@pytest.fixture(scope="module")
def planner_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("shape")
    capacity.write_model_config(folder, capacity.SHAPE_8B)
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, kv_cache_dtype="kvq-int4", max_model_len=4096
    ).create_engine_config()
