"""New blocks are zeroed over the whole page of every layer that may read them as floats."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from kvq_vllm import zeroing

PAGE_BYTES, USED_BYTES = 64, 16


def test_layers_with_a_wider_page_at_the_same_address() -> None:
    pool = torch.full((4, PAGE_BYTES), 0xFF, dtype=torch.uint8)
    layers = {
        "quantised": SimpleNamespace(kv_cache=pool[:, :USED_BYTES]),
        "skipped": SimpleNamespace(kv_cache=pool.view(torch.float32)),
        "not bound yet": SimpleNamespace(kv_cache=torch.tensor([])),
    }
    sizes = {"block_size": 1, "num_kv_heads": 1, "head_size": 8, "dtype": torch.uint8}
    groups = [
        SimpleNamespace(kv_cache_spec=FullAttentionSpec(**sizes), layer_names=[name])
        for name in ("quantised", "skipped")
    ]
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    zeroing.take_over()
    CPUModelRunner._zero_block_ids(runner, [1, 3])
    assert not pool[[1, 3]].any()
    assert (pool[[0, 2]] == 0xFF).all()
