"""The fp8 formats: every code, extremes, and attention over pages against fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from support.fp8 import E4M3, E5M2, Fp8Layer, PagedFp8Cache, dense_attention, random_scales
from support.paged import Sequence, random_sequence

from kvq_kernels import AttentionParams, Batch
from kvq_kernels import cpu as cpu_library
from kvq_kernels.fp8 import FP8_DTYPES, Fp8Format, cpu, is_fp8, reference, select_kernels

KERNELS = {"reference": reference, "cpu": cpu}
TYPES = [E4M3, E5M2]


@pytest.fixture(params=["reference", "portable", "avx2", "avx512"])
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The oracle, and the C++ kernels with each instruction set of this CPU."""
    if request.param == "reference":
        yield reference
        return
    if reason := cpu_library.why_unavailable():
        pytest.skip(reason)
    best = cpu_library.isa()
    try:
        cpu_library.select_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield cpu
    cpu_library.select_isa(best)


def write(
    kernels: ModuleType, key: torch.Tensor, value: torch.Tensor, layer: Fp8Layer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of one request's tokens, read from the pages; ``[tokens, heads, head_size]`` each."""
    paged = PagedFp8Cache(layer, 1, len(key), kernels=kernels)
    batch = Batch(
        torch.tensor([0, len(key)], dtype=torch.int32), torch.tensor([len(key)], dtype=torch.int32)
    )
    kernels.write(key, value, paged.cache, batch)
    pages = paged.cache.pages[paged.cache.block_table[0].long()]
    tokens = pages.transpose(1, 2).flatten(0, 1)[: len(key)]
    key_codes, value_codes = tokens.chunk(2, -1)
    return key_codes, value_codes


def layer_of(name: str, head_size: int, num_kv_heads: int, scales: str = "random") -> Fp8Layer:
    if scales == "ones":
        return Fp8Layer(Fp8Format(name, head_size), *torch.ones(2, num_kv_heads))
    return Fp8Layer(
        Fp8Format(name, head_size), random_scales(num_kv_heads), random_scales(num_kv_heads)
    )


# --- codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_every_16_bit_number_becomes_pytorchs_code(
    name: str, dtype: torch.dtype, kernels: ModuleType
) -> None:
    """All of bf16 or fp16; as fp32, those and their neighbours, so all ties between codes."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    if dtype == torch.float16:
        numbers = numbers.view(torch.int16).view(torch.float16)
    elif dtype == torch.float32:
        exact = torch.cat([numbers.float(), numbers.view(torch.int16).view(torch.float16).float()])
        bits = exact.view(torch.int32)
        numbers = torch.cat([exact, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])
    fmt = Fp8Format(name, 64)
    key = numbers.view(-1, 1, 64)
    codes, _ = write(kernels, key, key, layer_of(name, 64, 1, "ones"))
    finite = numbers.float().nan_to_num(nan=0.0)
    expected = finite.clamp(-fmt.largest, fmt.largest).to(fmt.dtype).view(torch.uint8)
    assert torch.equal(codes.flatten(), expected)
    assert codes.contiguous().view(fmt.dtype).float().isfinite().all()


@pytest.mark.parametrize("name", TYPES)
def test_codes_with_scales_are_those_of_the_quotient(name: str, kernels: ModuleType) -> None:
    layer = layer_of(name, 80, 3)
    key, value = torch.randn(2, 70, 3, 80) * 10.0 ** torch.randint(-4, 3, (2, 70, 3, 80))
    key_codes, value_codes = write(kernels, key, value, layer)
    for codes, x, scale in (
        (key_codes, key, layer.key_scale),
        (value_codes, value, layer.value_scale),
    ):
        scaled = (x / scale[:, None]).clamp(-layer.fmt.largest, layer.fmt.largest)
        assert torch.equal(codes, scaled.to(layer.fmt.dtype).view(torch.uint8))


@pytest.mark.parametrize("name", TYPES)
def test_every_code_is_read_as_pytorch_reads_it(name: str, kernels: ModuleType) -> None:
    """One key whose logit dominates: the output is the value behind it, code by code."""
    fmt = Fp8Format(name, 64)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(fmt.dtype).float().isfinite()]
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % 64)).view(-1, 1, 64)
    layer = layer_of(name, 64, 1)
    paged = PagedFp8Cache(layer, len(codes), 1, kernels=kernels)
    blocks = paged.cache.block_table[:, 0].long()
    paged.cache.pages[blocks, :, 0] = torch.cat([codes, codes], -1)
    batch = Batch(
        torch.arange(len(codes) + 1, dtype=torch.int32),
        torch.ones(len(codes), dtype=torch.int32),
    )
    out = torch.empty(len(codes), 1, 64)
    kernels.decode(torch.ones(len(codes), 1, 64), paged.cache, batch, AttentionParams(1e-6), out)
    expected = codes.view(fmt.dtype).float() * layer.value_scale[:, None]
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", TYPES)
def test_extremes_saturate_and_nan_is_stored_as_zero(name: str, kernels: ModuleType) -> None:
    layer = layer_of(name, 16, 1, "ones")
    extremes = [torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-45, -0.0, 500.0, 60000.0]
    key = torch.tensor(extremes + [0.0] * 7).view(1, 1, 16)
    codes, _ = write(kernels, key, key, layer)
    back = codes.contiguous().view(layer.fmt.dtype).float().flatten()[: len(extremes)].tolist()
    most = layer.fmt.largest
    assert back[:7] == [most, -most, 0.0, most, -most, 0.0, 0.0]
    assert back[7:] == ([448.0, 448.0] if name == E4M3 else [512.0, 57344.0])


# --- attention -------------------------------------------------------------------------------

PARAMS = {
    "plain": AttentionParams(0.125),
    "window": AttentionParams(0.125, sliding_window=21),
    "soft cap": AttentionParams(0.125, soft_cap=3.0),
    "sinks": AttentionParams(0.125, sinks=torch.linspace(-1, 2, 6)),
    "alibi": AttentionParams(0.125, alibi_slopes=torch.linspace(0.01, 0.5, 6)),
}


def run(
    kernels: ModuleType,
    layer: Fp8Layer,
    sequences: list[Sequence],
    schedule: list[list[int]],
    params: AttentionParams,
    block_size: int = 16,
) -> list[torch.Tensor]:
    """Run steps of so many new tokens per sequence; return every sequence's outputs."""
    paged = PagedFp8Cache(
        layer,
        len(sequences),
        max(len(s.key) for s in sequences),
        block_size,
        num_speculative_tokens=4,
        kernels=kernels,
    )
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in schedule:
        for collected, out in zip(outputs, paged.step(sequences, step, params), strict=True):
            collected.append(out)
    return [torch.cat(collected) for collected in outputs]


def uneven_sequence(layer: Fp8Layer, num_tokens: int, num_heads: int) -> Sequence:
    """Tokens whose heads differ as their scales do."""
    heads = len(layer.key_scale)
    sequence = random_sequence(num_tokens, num_heads, heads, layer.fmt.head_size)
    sequence.key *= 20 * layer.key_scale[:, None]
    sequence.value *= 20 * layer.value_scale[:, None]
    # Logits of the same size in every head, whatever its scale.
    per_head = layer.key_scale.repeat_interleave(num_heads // heads)
    sequence.query /= 40 * per_head[:, None]
    return sequence


SCHEDULES = {
    "one shot": [[70, 33]],
    "chunks and decodes": [[1, 20], [17, 1], [1, 5], [16, 1], [33, 1], [1, 5], [1, 0]],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", TYPES)
def test_attention_is_that_of_fp64_on_pytorchs_casts(
    name: str, params: str, schedule: str, kernels: ModuleType
) -> None:
    torch.manual_seed(1)
    layer = layer_of(name, 64, 3)
    sequences = [uneven_sequence(layer, n, 6) for n in (70, 33)]
    outputs = run(kernels, layer, sequences, SCHEDULES[schedule], PARAMS[params])
    for sequence, out in zip(sequences, outputs, strict=True):
        expected = dense_attention(sequence, layer, PARAMS[params])
        for head in range(6):  # heads differ by orders of magnitude
            scale = expected[:, head].abs().max()
            error = (out[:, head] - expected[:, head]).abs().max() / scale
            assert error < 5e-6


@pytest.mark.parametrize(
    ("head_size", "num_heads", "num_kv_heads", "block_size"),
    [(16, 1, 1, 16), (80, 7, 1, 32), (96, 4, 4, 48), (128, 8, 1, 128), (256, 2, 1, 16)],
)
def test_shapes(
    head_size: int, num_heads: int, num_kv_heads: int, block_size: int, kernels: ModuleType
) -> None:
    layer = layer_of(E4M3, head_size, num_kv_heads)
    sequences = [uneven_sequence(layer, n, num_heads) for n in (150, 40)]
    schedule = [[149, 35], [1, 5]]
    params = AttentionParams(head_size**-0.5)
    outputs = run(kernels, layer, sequences, schedule, params, block_size)
    for sequence, out in zip(sequences, outputs, strict=True):
        expected = dense_attention(sequence, layer, params)
        scale = expected.abs().amax((0, 2), keepdim=True)
        assert ((out - expected) / scale).abs().max() < 5e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_models(dtype: torch.dtype, kernels: ModuleType) -> None:
    layer = layer_of(E4M3, 64, 2, "ones")
    sequence = random_sequence(90, 4, 2, 64, dtype)
    params = AttentionParams(0.125)
    (out,) = run(kernels, layer, [sequence], [[88], [1], [1]], params)
    expected = dense_attention(sequence, layer, params)
    assert out.dtype == dtype
    limit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert ((out - expected).abs() / expected.abs().clamp(min=0.1)).max() < 1.1 * limit


def test_padding_rows_and_other_requests_are_left_alone(kernels: ModuleType) -> None:
    layer = layer_of(E4M3, 64, 2)
    paged = PagedFp8Cache(layer, 2, 40, kernels=kernels)
    key = torch.randn(12, 2, 64)
    batch = Batch(
        torch.tensor([2, 7, 7], dtype=torch.int32), torch.tensor([5, 33], dtype=torch.int32)
    )
    before = paged.cache.pages.clone()
    kernels.write(key, key, paged.cache, batch)
    changed = (paged.cache.pages != before).any(-1).any(1)  # [block, slot]
    block = int(paged.cache.block_table[0, 0])
    assert set(changed.nonzero()[:, 0].tolist()) == {block}
    assert changed[block].tolist() == [True] * 5 + [False] * 11
    out = torch.full((12, 4, 64), 7.0)
    for attend in (kernels.decode, kernels.prefill):
        attend(torch.randn(12, 4, 64), paged.cache, batch, AttentionParams(0.1), out)
        assert (out[:2] == 7).all()
        assert (out[7:] == 7).all()
        assert out[2:7].isfinite().all()


@pytest.mark.parametrize("splits", [(2500, 1), (2499, 2), (1, 2500)], ids=str)
def test_long_contexts(splits: tuple[int, int], kernels: ModuleType) -> None:
    layer = layer_of(E4M3, 32, 1)
    sequence = uneven_sequence(layer, sum(splits), 2)
    params = AttentionParams(32**-0.5)
    (out,) = run(kernels, layer, [sequence], [[n] for n in splits], params, block_size=64)
    expected = dense_attention(sequence, layer, params)
    assert ((out - expected).abs().max() / expected.abs().max()) < 1e-5


def test_fused_rows_need_no_copy(kernels: ModuleType) -> None:
    """Queries, keys and values as slices of one projection's output."""
    layer = layer_of(E4M3, 64, 2)
    fused = torch.randn(30, (4 + 2 + 2) * 64)
    query, key, value = fused.split([256, 128, 128], dim=1)
    parts = query.view(30, 4, 64), key.view(30, 2, 64), value.view(30, 2, 64)
    (out,) = run(kernels, layer, [Sequence(*parts)], [[30]], AttentionParams(0.125))
    whole = Sequence(*(x.clone() for x in parts))
    (expected,) = run(reference, layer, [whole], [[30]], AttentionParams(0.125))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


# --- names and choices -----------------------------------------------------------------------


def test_names() -> None:
    assert Fp8Format("kvq-fp8", 64).dtype == Fp8Format(E4M3, 64).dtype == torch.float8_e4m3fn
    assert Fp8Format(E5M2, 64).largest == 57344
    assert all(map(is_fp8, FP8_DTYPES))
    assert not any(map(is_fp8, (None, "fp8", "kvq-int8")))
    assert Fp8Format("kvq-fp8", 128).bytes_per_token == 256


@pytest.mark.parametrize(
    ("name", "head_size", "message"),
    [("kvq-fp9", 64, "Unknown format 'kvq-fp9'"), (E4M3, 72, "head size 72"), (E5M2, 512, "512")],
)
def test_formats_that_do_not_exist(name: str, head_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp8Format(name, head_size)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_chosen_as_for_the_other_formats(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "cpu" and (reason := cpu_library.why_unavailable()):
        pytest.skip(reason)
    monkeypatch.setenv("KVQ_KERNELS", name)
    assert select_kernels(torch.device("cpu")) is KERNELS[name]


def test_a_cache_of_other_pages_is_refused() -> None:
    if reason := cpu_library.why_unavailable():
        pytest.skip(reason)
    layer = layer_of(E4M3, 64, 2)
    good = PagedFp8Cache(layer, 1, 16).cache
    batch = Batch(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1])))
    key = torch.randn(1, 2, 64)
    for change in (
        {"pages": good.pages[..., :64]},
        {"key_scale": good.key_scale[:1]},
        {"value_scale": good.value_scale.double()},
    ):
        bad = dataclasses.replace(good, **change)
        with pytest.raises(ValueError, match=r"pages|scales"):
            cpu.write(key, key, bad, batch)
