"""The Triton kernels of the fp8 formats, in Triton's interpreter, against the oracle."""

from __future__ import annotations

import pytest
import torch
import triton
from support.fp8 import E4M3, E5M2, Fp8Layer, PagedFp8Cache, random_scales
from support.paged import Sequence, random_sequence
from triton import language as tl

from kvq_kernels import AttentionParams, Batch
from kvq_kernels.fp8 import Fp8Format, reference
from kvq_kernels.fp8 import triton as kernels

TYPES = [E4M3, E5M2]


@triton.jit
def _convert(x, codes, back, N: tl.constexpr, E4M3: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    code = kernels.to_codes(tl.load(x + offsets), E4M3)
    tl.store(codes + offsets, code.to(tl.uint8))
    tl.store(back + offsets, kernels.to_fp16(code.to(tl.uint8), E4M3, False))


@pytest.mark.parametrize("name", TYPES)
def test_every_16_bit_number_and_its_neighbours_become_pytorchs_code(name: str) -> None:
    """So all ties between codes, all codes, and what lies just beside them."""
    fmt = Fp8Format(name, 64)
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16)
    exact = torch.cat([numbers.view(torch.bfloat16).float(), numbers.view(torch.float16).float()])
    bits = exact.view(torch.int32)
    x = torch.cat([exact, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])
    codes = torch.empty(len(x), dtype=torch.uint8)
    back = torch.empty(len(x), dtype=torch.float16)
    n = 2**16
    _convert[(len(x) // n,)](x, codes, back, n, name == E4M3)
    expected = x.nan_to_num(nan=0.0).clamp(-fmt.largest, fmt.largest).to(fmt.dtype)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert torch.equal(back.float() * (256 if name == E4M3 else 1), expected.float())
    assert len(codes.unique()) == (254 if name == E4M3 else 248)  # all but infinity and NaN


def layer_of(name: str, head_size: int, num_kv_heads: int) -> Fp8Layer:
    fmt = Fp8Format(name, head_size)
    return Fp8Layer(fmt, random_scales(num_kv_heads), random_scales(num_kv_heads))


def uneven_sequence(layer: Fp8Layer, num_tokens: int, num_heads: int) -> Sequence:
    """Tokens whose heads differ as their scales do."""
    heads = len(layer.key_scale)
    sequence = random_sequence(num_tokens, num_heads, heads, layer.fmt.head_size)
    sequence.key *= 20 * layer.key_scale[:, None]
    sequence.value *= 20 * layer.value_scale[:, None]
    sequence.query /= 40 * layer.key_scale.repeat_interleave(num_heads // heads)[:, None]
    return sequence


def compare(
    layer: Fp8Layer,
    sequences: list[Sequence],
    schedule: list[list[int]],
    params: AttentionParams,
    block_size: int = 16,
) -> None:
    """Run steps of so many new tokens per sequence: the same pages, the same outputs."""
    paged = []
    for k in (kernels, reference):
        torch.manual_seed(2)  # the same blocks
        paged.append(
            PagedFp8Cache(
                layer, len(sequences), max(len(s.key) for s in sequences), block_size, 4, k
            )
        )
    for step in schedule:
        before = [s.computed for s in sequences]
        actual = paged[0].step(sequences, step, params)
        for sequence, computed in zip(sequences, before, strict=True):
            sequence.computed = computed
        expected = paged[1].step(sequences, step, params)
        assert torch.equal(paged[0].cache.pages, paged[1].cache.pages)
        for a, b in zip(actual, expected, strict=True):
            error = (a - b).abs().amax((0, 2)) if a.numel() else torch.zeros(1)
            scale = b.abs().amax((0, 2)) if b.numel() else torch.ones(1)
            assert (error / scale).max() < 5e-6


PARAMS = {
    "plain": AttentionParams(0.125),
    "window": AttentionParams(0.125, sliding_window=21),
    "soft cap": AttentionParams(0.125, soft_cap=3.0),
    "sinks": AttentionParams(0.125, sinks=torch.linspace(-1, 2, 6)),
    "alibi": AttentionParams(0.125, alibi_slopes=torch.linspace(0.01, 0.5, 6)),
}


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", TYPES)
def test_steps_of_any_kind(name: str, params: str) -> None:
    layer = layer_of(name, 32, 2)
    sequences = [uneven_sequence(layer, n, 6) for n in (90, 37)]
    compare(layer, sequences, [[40, 1], [1, 30], [5, 1], [1, 0], [42, 5]], PARAMS[params])


@pytest.mark.parametrize(
    ("head_size", "num_heads", "num_kv_heads", "block_size"),
    [(16, 1, 1, 16), (80, 7, 1, 32), (96, 2, 2, 48), (256, 2, 1, 128)],
)
def test_shapes(head_size: int, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    layer = layer_of(E4M3, head_size, num_kv_heads)
    sequences = [uneven_sequence(layer, n, num_heads) for n in (70, 20)]
    params = AttentionParams(head_size**-0.5)
    compare(layer, sequences, [[69, 15], [1, 5]], params, block_size)


def test_keys_in_more_splits_than_tiles() -> None:
    layer = layer_of(E4M3, 16, 1)
    sequences = [uneven_sequence(layer, n, 2) for n in (700, 3)]
    compare(layer, sequences, [[699, 2], [1, 1]], AttentionParams(0.25), block_size=64)


@pytest.mark.parametrize("before", [0, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_requests_without_new_tokens_anywhere(count: int, before: int) -> None:
    """Padding in the middle and at the end, as CUDA graphs have it, and others' rows before."""
    layer = layer_of(E4M3, 16, 1)
    paged = PagedFp8Cache(layer, count, 16, kernels=kernels)
    new = torch.tensor([i % 3 for i in range(count)])
    starts = (torch.cat([torch.zeros(1), new.cumsum(0)]) + before).to(torch.int32)
    batch = Batch(starts, (new + 4).to(torch.int32))
    rows = int(starts[-1]) + 3
    paged.cache.pages.zero_()
    tokens = torch.randn(rows, 1, 16)
    other = paged.cache.pages.clone()
    kernels.write(tokens, tokens, paged.cache, batch)
    written = paged.cache.pages.clone()
    paged.cache.pages.copy_(other)
    reference.write(tokens, tokens, paged.cache, batch)
    assert torch.equal(written, paged.cache.pages)
    query = torch.randn(rows, 2, 16)
    for attend in (kernels.decode, kernels.prefill):
        out, expected = (torch.full((rows, 2, 16), 7.0) for _ in range(2))
        attend(query, paged.cache, batch, AttentionParams(0.25), out)
        reference.attend(query, paged.cache, batch, AttentionParams(0.25), expected)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        assert (out[:before] == 7).all()
        assert (out[int(starts[-1]) :] == 7).all()
