"""A step with the Triton kernels reads nothing on the host that is computed on the device.

Such a read would stall every layer, and cannot be captured into a CUDA graph. The tensors here
have shapes and no contents, so that any look at a value raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from triton.runtime.jit import JITFunction

import kvq_kernels.triton
from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, formats, reference
from kvq_kernels.triton import blocks, tuning
from kvq_vllm import backend
from kvq_vllm.backend import KVQImpl, KVQMetadata
from kvq_vllm.residual import LAYER_SUFFIX

HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 128


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace kernel launches by a record of the kernels' names."""
    names: list[str] = []

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names.append(kernel.fn.__name__)
        assert all(isinstance(size, int) for size in grid)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(tuning, "device_info", lambda device: tuning.DeviceInfo("sm_90", 132))
    return names


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    cached = (formats.hadamard, blocks.rotation)
    for function in cached:  # no real tensors here, and no fakes in other tests
        function.cache_clear()
    with FakeTensorMode() as mode:
        yield mode
    for function in cached:
        function.cache_clear()


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def forward(
    name: str,
    num_decodes: int,
    num_prefills: int,
    params: AttentionParams,
    monkeypatch: pytest.MonkeyPatch,
    kernels: Any = kvq_kernels.triton,
) -> None:
    """Run the impl's forward on one decode token per decode, 100 tokens per prefill."""
    fmt = Format.create(name, HEAD_SIZE)
    ring = empty(40, KV_HEADS, 32, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    num_requests = num_decodes + num_prefills
    num_tokens = num_decodes + 100 * num_prefills

    def batch(requests: int) -> Batch | None:
        return Batch(empty(requests + 1), empty(requests)) if requests else None

    def metadata(table_width: int) -> KVQMetadata:
        return KVQMetadata(
            requests=Batch(empty(num_requests + 1), empty(num_requests)),
            decodes=batch(num_decodes),
            prefills=batch(num_prefills),
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            block_table=empty(num_requests, table_width),
        )

    impl: Any = KVQImpl.__new__(KVQImpl)
    impl.fmt, impl.params, impl.kernels, impl.residual_name = fmt, params, kernels, "ring"
    layer = SimpleNamespace(ring=ring, spec=SimpleNamespace(capacity=fmt.unit_size))
    context = SimpleNamespace(
        no_compile_layers={"ring": layer}, attn_metadata={"ring": metadata(fmt.unit_size // 32)}
    )
    monkeypatch.setattr(backend, "get_forward_context", lambda: context)
    query = empty(num_tokens, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    key = empty(num_tokens, KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    pages = empty(40, KV_HEADS, fmt.unit_size, fmt.bytes_per_token, dtype=torch.uint8)
    impl.forward(layer, query, key, key, pages, metadata(64), torch.empty_like(query))


@pytest.mark.parametrize("features", ["plain", "all"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_decode_step_takes_three_launches(
    name: str,
    features: str,
    launches: list[str],
    fake: FakeTensorMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = AttentionParams(scale=0.1)
    if features == "all":
        heads = empty(HEADS, dtype=torch.float32)
        params = AttentionParams(0.1, 30.0, 1000, sinks=heads, alibi_slopes=heads)
    forward(name, 5, 0, params, monkeypatch)
    assert len(launches) == 3, launches


@pytest.mark.parametrize("decodes", [0, 5])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_step_with_prefills(
    name: str,
    decodes: int,
    launches: list[str],
    fake: FakeTensorMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward(name, decodes, 2, AttentionParams(scale=0.1), monkeypatch)
    # Seal, prefill, ring; for decodes ring, decode, combine as well.
    assert len(launches) == (6 if decodes else 3), launches


def test_the_check_can_tell(fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle looks at lengths on the host."""
    with pytest.raises(DataDependentOutputException):
        forward("kvq-int4", 5, 0, AttentionParams(scale=0.1), monkeypatch, kernels=reference)


def test_the_builder_reads_nothing_either(fake: FakeTensorMode) -> None:
    builder: Any = backend.KVQMetadataBuilder.__new__(backend.KVQMetadataBuilder)
    builder.reorder_batch_threshold = 1
    builder._seq_lens = empty(8)
    common = SimpleNamespace(
        max_query_len=1,
        num_reqs=5,
        num_actual_tokens=5,
        query_start_loc=empty(6),
        query_start_loc_cpu=None,  # known to be all decodes by the longest query
        seq_lens=empty(5),
        slot_mapping=empty(5, dtype=torch.int64),
        block_table_tensor=empty(5, 64),
    )
    builder.build(0, common)


def test_what_kernels_keep_is_made_when_weights_are_loaded(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is captured into a CUDA graph must not create it; sleep mode saves buffers."""
    impl: Any = KVQImpl.__new__(KVQImpl)
    impl.fmt, impl.params = Format.create("kvq-int4", HEAD_SIZE), AttentionParams(scale=0.1)
    impl.kv_cache_dtype, impl.sinks, impl.alibi_slopes = "kvq-int4", None, None
    layer: Any = torch.nn.Module()
    layer.impl, layer._k_scale = impl, torch.ones(())
    layers = {"layer": layer, "layer" + LAYER_SUFFIX: None}
    compilation = SimpleNamespace(static_forward_context=layers)
    impl.vllm_config = SimpleNamespace(compilation_config=compilation)
    monkeypatch.setattr(backend, "select_kernels", lambda device: kvq_kernels.triton)
    monkeypatch.setattr(backend, "_check_attention_class", lambda *args: None)
    blocks.rotation.cache_clear()
    impl.process_weights_after_loading(torch.bfloat16)
    made = blocks.rotation.cache_info().misses
    assert made == 1
    buffers = list(layer.buffers())
    for table in blocks.rotation(HEAD_SIZE, torch.device("cpu")):
        assert any(table is buffer for buffer in buffers)

    forward("kvq-int4", 5, 2, impl.params, monkeypatch)
    assert "_prefill_kernel" in launches
    assert blocks.rotation.cache_info().misses == made
