"""Layers that share a cache: the owner stores, all attend, the last writes the prefills' ring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvq_kernels import AttentionParams, Batch, Format
from kvq_vllm import backend
from kvq_vllm.backend import NO_TOKENS, KVQImpl, KVQMetadata


class Recorder:
    """Kernels that note their calls, and which keys they got."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.keys: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            self.calls.append(name)
            if name == "prefill":
                self.keys.append(args[1].clone())

        return call


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three layers, of which the last two read the cache of the first."""
    monkeypatch.setattr(backend, "_check_attention_class", lambda *args: None)
    layers = {}
    for name, target in (("a", None), ("b", "a"), ("c", "a")):
        impl: Any = KVQImpl.__new__(KVQImpl)
        impl.fmt, impl.params = Format.create("kvq-int8", 64), AttentionParams(1.0)
        impl.kernels, impl.shared_name, impl.residual_name = Recorder(), target, "ring"
        impl.kv_cache_dtype = "kvq-int8"
        impl.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers)
        )
        layers[name] = SimpleNamespace(impl=impl, kv_sharing_target_layer_name=target)
    for layer in layers.values():
        layer.impl.find_layer()
    ring = SimpleNamespace(ring=torch.zeros(4, 1, 32, 128), spec=SimpleNamespace(capacity=128))
    monkeypatch.setattr(
        backend,
        "get_forward_context",
        lambda: SimpleNamespace(
            no_compile_layers={"ring": ring},
            attn_metadata={"ring": SimpleNamespace(block_table=torch.zeros(2, 4).int())},
        ),
    )
    return layers


def step(layers: dict[str, Any], num_decodes: int, prefills: bool) -> torch.Tensor:
    """Run all layers as vLLM does, and return the owner's new keys as they were."""
    batch = Batch(torch.zeros(1).int(), torch.zeros(1).int())
    metadata = KVQMetadata(
        requests=batch,
        decodes=batch if num_decodes else None,
        prefills=batch if prefills else None,
        num_decodes=num_decodes,
        num_decode_tokens=num_decodes,
        block_table=torch.zeros(2, 4).int(),
    )
    query, key = torch.randn(5, 1, 64), torch.randn(5, 1, 64)
    before = key.clone()
    for layer in layers.values():
        new = key if layer.impl.shared_name is None else None
        layer.impl.forward(layer, query, new, new, None, metadata, torch.empty_like(query))
        key.fill_(torch.nan)  # a compiled model may reuse the memory
    return before


def calls(layers: dict[str, Any]) -> list[list[str]]:
    return [layer.impl.kernels.calls for layer in layers.values()]


def test_prefills_leave_the_ring_to_the_last_layer(layers: dict[str, Any]) -> None:
    key = step(layers, 0, prefills=True)
    assert calls(layers) == [["seal", "prefill"], ["prefill"], ["prefill", "write_ring"]]
    for layer in layers.values():
        assert torch.equal(layer.impl.kernels.keys[0], key)
    assert layers["a"].impl._kept_tokens is NO_TOKENS  # nothing stays behind


def test_decodes_are_stored_once(layers: dict[str, Any]) -> None:
    step(layers, 2, prefills=False)
    assert calls(layers) == [["store", "decode"], ["decode"], ["decode"]]
    assert layers["a"].impl._kept_tokens is NO_TOKENS  # none were copied


def test_a_batch_of_both(layers: dict[str, Any]) -> None:
    step(layers, 2, prefills=True)
    assert calls(layers) == [
        ["seal", "write_ring", "decode", "prefill"],
        ["decode", "prefill"],
        ["decode", "prefill", "write_ring"],
    ]
