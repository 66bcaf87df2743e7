"""The C++ kernels against the oracle.

Every comparison runs both on the same cache, so that what is compared is one operation.
Free memory is poisoned: unused pages are 0xFF (fp16 NaN), unused ring slots NaN, unused table
entries point outside of any memory.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, LayerCache, cpu, reference
from kvq_kernels.cpu import build

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.why_unavailable()))

NOWHERE = 2**30  # a block number that nothing may follow
ISAS = ("portable", "avx2", "avx512", "amx")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
default_dtype = torch.float32
"""Of models, where a test does not say."""

# Largest error over largest output, by the dtype of the output. Both sides round their output
# once, so they may differ by one unit in the last place: 2^-8 of a bf16's value, 2^-11 of an
# fp16's. On top comes the kernels' own error. Decode rounds query times scale and weight times
# scale to 16-bit integers (up to 1e-3 where one channel dominates); prefill computes in fp32 like
# the oracle, in another order.
LAST_PLACE = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 0.0}
DECODE_ERROR = 1e-3
PREFILL_ERROR = 2e-5
TILES_ERROR = 5e-2
"""Of prefill with AMX, for models in bf16: it rounds dequantised keys to bf16, which outliers of
these tests' keys and queries make much of."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors need no threads, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test with each instruction set that this CPU has."""
    if request.param == "amx":  # it is of use to bf16 only
        monkeypatch.setattr(sys.modules[__name__], "default_dtype", torch.bfloat16)
    before = cpu.isa()
    try:
        cpu.select_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    cpu.select_isa(before)


@dataclass
class Step:
    """One step of a batch: a cache holding the context, and the new tokens."""

    cache: LayerCache
    batch: Batch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    params: AttentionParams

    def out(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(self.query.shape, -77.0, dtype=dtype)


def make_step(
    name: str = "kvq-int4",
    head_size: int = 64,
    contexts: Sequence[int] = (130,),
    new: Sequence[int] = (1,),
    *,
    num_kv_heads: int = 2,
    gqa: int = 2,
    dtype: torch.dtype | None = None,
    unit_size: int = 64,
    group: int | None = None,
    units_per_block: int = 1,
    extra_ring_blocks: int = 1,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
    **params: object,
) -> Step:
    """Return a batch of requests with `contexts` tokens each and `new` tokens on top.

    The context is sealed and written by the oracle. Keys have outlier channels, and the first
    token stands apart, as in real models.
    """
    dtype = dtype or default_dtype
    gen = torch.Generator().manual_seed(seed)
    fmt = Format.create(name, head_size, unit_size, group)
    block_size = unit_size * units_per_block
    totals = [c + n for c, n in zip(contexts, new, strict=True)]
    blocks = [-(-total // block_size) for total in totals]
    num_blocks = sum(blocks) + 2

    # Pages and ring are every other block of a larger tensor, so only the inner three dimensions
    # are contiguous.
    shape = (2 * num_blocks, num_kv_heads, block_size, fmt.bytes_per_token)
    pages = torch.full(shape, 0xFF, dtype=torch.uint8)[::2]
    ring_block = unit_size // 4
    capacity = unit_size + extra_ring_blocks * ring_block
    per_request = capacity // ring_block
    ring_shape = (2 * per_request * len(totals), num_kv_heads, ring_block, 2 * head_size)
    ring = torch.full(ring_shape, torch.nan, dtype=dtype)[::2]

    block_table = torch.full((len(totals), max(blocks) + 3), NOWHERE, dtype=torch.int32)
    free = torch.randperm(num_blocks, generator=gen).int()
    for request, count in enumerate(blocks):
        block_table[request, :count] = free[:count]
        free = free[count:]
    ring_table = torch.randperm(per_request * len(totals), generator=gen).int()
    cache = LayerCache(
        fmt, pages, block_table, ring, ring_table.view(len(totals), per_request), capacity
    )

    def tokens(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, head_size, generator=gen)

    outliers = 1 + 7 * (torch.rand(num_kv_heads, head_size, generator=gen) > 0.9)
    for request, context in enumerate(contexts):
        key, value = tokens(context, num_kv_heads) * outliers, tokens(context, num_kv_heads)
        key[:1] *= 4
        alone = dataclasses.replace(
            cache,
            block_table=cache.block_table[request : request + 1],
            ring_table=cache.ring_table[request : request + 1],
        )
        batch = Batch(torch.tensor([0, context]), torch.tensor([context]))
        reference.seal(key.to(dtype), value.to(dtype), alone, batch)
        reference.write_ring(key.to(dtype), value.to(dtype), alone, batch)

    # New tokens are rows of a fused tensor, with rows of others before and after.
    before, after = 3, 2
    num_heads = gqa * num_kv_heads
    count = before + sum(new) + after
    fused = torch.cat(
        [
            tokens(count, num_heads) * 2,
            tokens(count, num_kv_heads) * outliers,
            tokens(count, num_kv_heads),
        ],
        dim=1,
    ).to(dtype)
    query, key, value = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    starts = torch.tensor([before, *new]).cumsum(0).to(index_dtype)
    lens = torch.tensor([t if n else 7777 for t, n in zip(totals, new, strict=True)])
    sliding_window = params.get("sliding_window")
    if sliding_window:
        for request, context in enumerate(contexts):
            lowest = max(0, context - sliding_window + 1) // block_size
            block_table[request, :lowest] = NOWHERE
    params.setdefault("scale", head_size**-0.5)
    return Step(
        cache, Batch(starts, lens.to(index_dtype)), query, key, value, AttentionParams(**params)
    )


def copy_of(cache: LayerCache) -> LayerCache:
    return dataclasses.replace(cache, pages=cache.pages.clone(), ring=cache.ring.clone())


def sealed_by_both(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Seal copies of the step's cache with the oracle and the kernel; return both pages."""
    expected, actual = copy_of(step.cache), copy_of(step.cache)
    reference.seal(step.key, step.value, expected, step.batch)
    cpu.seal(step.key, step.value, actual, step.batch)
    return expected.pages, actual.pages


def error_of(operation: str, step: Step) -> float:
    """Return what an operation's own rounding may make of the largest output."""
    if operation == "decode":
        return DECODE_ERROR
    tiles = cpu.isa() == "amx" and step.query.dtype == torch.bfloat16
    return TILES_ERROR if tiles else PREFILL_ERROR


def assert_attention_matches(
    step: Step, operation: str, out_dtype: torch.dtype | None = None, error: float | None = None
) -> torch.Tensor:
    """Run `operation` with the oracle and the kernel, on the oracle's cache; return the output."""
    reference.seal(step.key, step.value, step.cache, step.batch)
    if operation == "decode":
        reference.write_ring(step.key, step.value, step.cache, step.batch)
        tensors = (step.query,)
    else:
        tensors = (step.query, step.key, step.value)
    dtype = out_dtype or step.query.dtype
    expected, actual = step.out(torch.float32), step.out(dtype)
    getattr(reference, operation)(*tensors, step.cache, step.batch, step.params, expected)
    getattr(cpu, operation)(*tensors, step.cache, step.batch, step.params, actual)

    starts = step.batch.query_start_loc.tolist()
    mine = slice(starts[0], starts[-1])
    untouched = torch.cat([actual[: mine.start], actual[mine.stop :]])
    assert (untouched == -77.0).all(), "rows of others were written"
    if mine.start == mine.stop:
        return actual
    expected, compared = expected[mine], actual[mine].float()
    assert compared.isfinite().all()
    allowed = error or error_of(operation, step)
    difference = (compared - expected).abs()
    limit = allowed * expected.abs().max() + LAST_PLACE[dtype] * expected.abs()
    worst = (difference - limit).max().item()
    assert worst <= 0, f"error {difference.max() / expected.abs().max():.2e} of the largest output"
    return actual


# --- seal ------------------------------------------------------------------------------------


def codes_of(pages: torch.Tensor, fmt: Format, what: str) -> torch.Tensor:
    """Return key or value codes of contiguous pages, one per byte."""
    records = pages.reshape(-1, fmt.record_bytes)
    blobs = records[:, : fmt.num_blobs * fmt.blob_bytes].reshape(-1, fmt.blob_bytes)
    offset = getattr(fmt, f"{what}_codes_offset")
    packed = blobs[:, offset : offset + getattr(fmt, f"{what}_codes_bytes")]
    bits = fmt.key_bits if what == "key" else fmt.value_bits
    codes = packed if bits == 8 else torch.stack([packed & 15, packed >> 4])
    return codes.int()


def assert_records_match(expected: torch.Tensor, actual: torch.Tensor, fmt: Format) -> None:
    """Compare pages: all bytes, but for rotated values, whose codes may differ by one."""
    if not fmt.rotate_values:
        assert torch.equal(expected, actual)
        return

    def without_values(pages: torch.Tensor) -> torch.Tensor:
        records = pages.reshape(-1, fmt.record_bytes).clone()
        for blob in range(fmt.num_blobs):
            start = blob * fmt.blob_bytes
            codes = start + fmt.value_codes_offset
            meta = start + fmt.value_meta_offset
            records[:, codes : codes + fmt.value_codes_bytes] = 0
            records[:, meta : meta + fmt.value_meta_bytes] = 0
        return records

    assert torch.equal(without_values(expected), without_values(actual))
    difference = codes_of(expected, fmt, "value") - codes_of(actual, fmt, "value")
    assert difference.abs().max() <= 1
    # A rounding error of the rotation moves a code only near a tie, or with a scale or zero
    # that was rounded the other way.
    assert (difference != 0).float().mean() < 2e-2
    records = [p.reshape(-1, fmt.record_bytes) for p in (expected, actual)]
    written = (records[0] != 0xFF).any(-1)
    if written.any():
        (_, v), (_, v_actual) = (reference.unpack_records(r[written], fmt) for r in records)
        step = (v.amax(-1) - v.amin(-1)).max() / 15
        assert (v - v_actual).square().mean().sqrt() <= 0.02 * step + 1e-6


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 112, 128, 160, 192, 256])
def test_seal(name: str, head_size: int, isa: str) -> None:
    dtype = DTYPES[head_size // 16 % 3]
    step = make_step(name, head_size, (40, 0, 64, 200), (24, 200, 63, 1), dtype=dtype)
    assert_records_match(*sealed_by_both(step), step.cache.fmt)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("unit_size", "group", "units_per_block"),
    [(64, 32, 2), (128, 32, 1), (128, 64, 2), (128, 128, 1), (256, 64, 1), (256, 256, 2)],
)
def test_seal_layouts(
    name: str, unit_size: int, group: int, units_per_block: int, isa: str
) -> None:
    step = make_step(
        name, 64, (unit_size - 3, 0), (3, 2 * unit_size + 5), unit_size=unit_size, group=group,
        units_per_block=units_per_block,
    )  # fmt: skip
    assert_records_match(*sealed_by_both(step), step.cache.fmt)


@pytest.mark.parametrize("name", ["kvq-int8", "kvq-int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_seal_of_hostile_values(name: str, dtype: torch.dtype, isa: str) -> None:
    """Non-finite, huge, tiny, constant and all-bad groups."""
    step = make_step(name, 64, (60,), (68,), dtype=dtype)
    k, v = step.key, step.value
    largest = torch.finfo(dtype).max
    for x in (k, v):
        x[10, 0, 3] = torch.nan
        x[11, 0, 4] = torch.inf
        x[12, 0, 5] = -torch.inf
        x[13, 0, 6] = largest
        x[:, 1, 7] = 2.5
        x[:, 1, 8] = torch.nan
        x[:, 1, 9] = 1e-7 * torch.arange(len(x))
        x[20, 1] = torch.nan
    if name == "kvq-int4":  # a NaN token's rotated neighbours lose precision, in another order
        v[:] = step.query[:, ::2]
    assert_records_match(*sealed_by_both(step), step.cache.fmt)


def test_half_precision_is_exact(isa: str) -> None:
    """Scales and zeros of every fp16 value and of ties between them, as the reference has them."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    zeros = halves[halves.isfinite()].float().sort().values
    ties = (zeros[1:] + zeros[:-1]) / 2
    values = torch.cat([zeros, ties])
    values = torch.nn.functional.pad(values, (0, -len(values) % (64 * 256))).view(-1, 1, 256)
    step = make_step("kvq-int8", 256, (0,), (len(values),), num_kv_heads=1, gqa=1)
    step.key[3:-2], step.value[3:-2] = values, values.flip(0)
    assert torch.equal(*sealed_by_both(step))


# --- ring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_ring(dtype: torch.dtype, isa: str) -> None:
    step = make_step("kvq-int4", 80, (40, 0, 64, 11), (24, 200, 0, 1), dtype=dtype)
    expected, actual = copy_of(step.cache), copy_of(step.cache)
    reference.write_ring(step.key, step.value, expected, step.batch)
    cpu.write_ring(step.key, step.value, actual, step.batch)
    assert torch.equal(expected.ring.nan_to_num(nan=-1), actual.ring.nan_to_num(nan=-1))


def test_write_ring_refuses_another_dtype() -> None:
    step = make_step()
    with pytest.raises(TypeError, match="cannot hold"):
        cpu.write_ring(step.key.bfloat16(), step.value, step.cache, step.batch)


# --- attention -------------------------------------------------------------------------------

OPERATIONS = ("decode", "prefill")


def tokens_for(operation: str) -> dict[str, Sequence[int]]:
    """Lengths around unit boundaries (64), with an empty request among them."""
    if operation == "decode":
        return {"contexts": (63, 64, 200, 9, 0, 317), "new": (1, 1, 3, 0, 5, 5)}
    return {"contexts": (0, 130, 63, 64, 20), "new": (150, 65, 1, 0, 44)}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 112, 128, 160, 192, 256])
def test_head_sizes(operation: str, name: str, head_size: int, isa: str) -> None:
    dtype = DTYPES[head_size // 16 % 3]
    assert_attention_matches(
        make_step(name, head_size, **tokens_for(operation), dtype=dtype), operation
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("num_kv_heads", "gqa"), [(3, 1), (2, 3), (1, 4), (2, 5), (1, 8), (1, 16), (1, 71)]
)
def test_gqa(operation: str, name: str, num_kv_heads: int, gqa: int, isa: str) -> None:
    assert_attention_matches(
        make_step(name, **tokens_for(operation), num_kv_heads=num_kv_heads, gqa=gqa), operation
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("unit_size", "group", "units_per_block"),
    [(64, 32, 2), (128, 32, 1), (128, 64, 2), (128, 128, 1), (256, 64, 1), (256, 256, 2)],
)
def test_layouts(
    operation: str, name: str, unit_size: int, group: int, units_per_block: int, isa: str
) -> None:
    new = (1, 3) if operation == "decode" else (3 * unit_size, 9)
    step = make_step(
        name, 64, (2 * unit_size - 1, 5 * unit_size + 7), new, unit_size=unit_size, group=group,
        units_per_block=units_per_block, index_dtype=torch.int64,
    )  # fmt: skip
    assert_attention_matches(step, operation)


FEATURES = {
    "soft cap": {"soft_cap": 5.0},
    "window 1": {"sliding_window": 1},
    "window 100": {"sliding_window": 100},
    "window 128": {"sliding_window": 128},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 8.0, 0.0])},
    "bf16 sinks": {"sinks": torch.tensor([1.0, -2.0, 8.0, 0.0], dtype=torch.bfloat16)},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 1.0])},
    "all": {
        "soft_cap": 20.0,
        "sliding_window": 77,
        "sinks": torch.tensor([1.0, 4.0, 0.0, 2.0]),
        "alibi_slopes": torch.tensor([0.05, 0.1, 0.02, 0.01]),
    },
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(operation: str, name: str, feature: str, isa: str) -> None:
    assert_attention_matches(
        make_step(name, **tokens_for(operation), **FEATURES[feature]), operation
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(operation: str, dtype: torch.dtype, isa: str) -> None:
    for out_dtype in (*DTYPES, torch.float64):
        step = make_step(**tokens_for(operation), dtype=dtype, num_kv_heads=1)
        assert_attention_matches(step, operation, out_dtype)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1087, 1088, 2500])
def test_decode_lengths(length: int, isa: str) -> None:
    """Around units (64) and splits (1024)."""
    assert_attention_matches(make_step(contexts=(length - 1,)), "decode")


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
def test_drafts_cross_boundaries(new: int, isa: str) -> None:
    contexts = [128 - before for before in range(6)]
    step = make_step("kvq-k8v4", 64, contexts, [new] * 6, num_kv_heads=1)
    assert_attention_matches(step, "decode")


def test_long_drafts(isa: str) -> None:
    """A ring with room for several units: a decode step may cross more than one boundary."""
    step = make_step(contexts=(70,), new=(150,), extra_ring_blocks=12, num_kv_heads=1)
    assert_attention_matches(step, "decode")


def test_decode_and_prefill_agree_on_one_token(isa: str) -> None:
    """Same keys, so the same output up to decode's integer rounding."""
    step = make_step(contexts=(500,))
    prefill, decode = step.out(torch.float32), step.out(torch.float32)
    tensors = (step.query, step.key, step.value)
    cpu.prefill(*tensors, step.cache, step.batch, step.params, prefill)
    cpu.write_ring(step.key, step.value, step.cache, step.batch)
    cpu.decode(step.query, step.cache, step.batch, step.params, decode)
    error = max(DECODE_ERROR, error_of("prefill", step))
    assert (prefill - decode).abs().max() <= error * decode.abs().max()


def test_decode_error_is_small() -> None:
    """The error of a typical head, well below the bound for the worst."""
    step = make_step("kvq-int4", 128, (4000,), num_kv_heads=2, gqa=4, unit_size=128)
    assert_attention_matches(step, "decode", error=3e-4)


@pytest.mark.parametrize("isa", ["amx"], indirect=True)
@pytest.mark.parametrize("name", SCHEMES)
def test_error_with_tiles_is_small(name: str, isa: str) -> None:
    """The error of typical heads, well below the bound for the worst."""
    step = make_step(name, 128, (1000,), (64,), num_kv_heads=2, gqa=4, unit_size=128, scale=0.03)
    assert_attention_matches(step, "prefill", torch.float32, error=1e-2)


def test_nothing_to_do(isa: str) -> None:
    for new in ([], [0, 0]):
        step = make_step(contexts=(5, 70), new=(1, 1))
        starts = torch.zeros(len(new) + 1, dtype=torch.int32)
        step.batch = Batch(starts, torch.full((len(new),), 9999, dtype=torch.int32))
        before = copy_of(step.cache)
        cpu.seal(step.key, step.value, step.cache, step.batch)
        cpu.write_ring(step.key, step.value, step.cache, step.batch)
        out = step.out(torch.float32)
        cpu.decode(step.query, step.cache, step.batch, step.params, out)
        cpu.prefill(step.query, step.key, step.value, step.cache, step.batch, step.params, out)
        assert torch.equal(before.pages, step.cache.pages)
        assert (out == -77.0).all()


def test_nan_query_stays_in_its_row(isa: str) -> None:
    """One request's bad query must not reach another's output."""
    step = make_step(contexts=(100, 100), new=(1, 1))
    step.query[3, 0, 5] = torch.nan
    cpu.write_ring(step.key, step.value, step.cache, step.batch)
    out = step.out(torch.float32)
    cpu.decode(step.query, step.cache, step.batch, step.params, out)
    assert out[3, 0].isnan().all()
    assert out[3, 1:].isfinite().all()
    assert out[4].isfinite().all()


# --- threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_threads_do_not_change_results(operation: str) -> None:
    """To the bit: splits follow from lengths, and each output is computed by one thread."""
    new = (1, 2, 1) if operation == "decode" else (700, 64, 300)
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            step = make_step(contexts=(3000, 0, 70), new=new, num_kv_heads=3)
            outputs.append(assert_attention_matches(step, operation))
    finally:
        torch.set_num_threads(before)
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)


# --- properties ------------------------------------------------------------------------------

HEAD_SIZES = st.integers(1, 16).map(lambda n: 16 * n)


@st.composite
def steps(draw: st.DrawFn, operation: str) -> Step:
    """Any supported shape, with 1 to 3 requests of any length."""
    unit_size = draw(st.sampled_from([64, 128]))
    group = draw(st.sampled_from([g for g in (32, 64, 128) if g <= unit_size]))
    most_new = 1 + unit_size // 4 if operation == "decode" else 3 * unit_size
    requests = draw(
        st.lists(st.tuples(st.integers(0, 400), st.integers(0, most_new)), min_size=1, max_size=3)
    )
    num_kv_heads, gqa = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    params: dict[str, object] = {
        "soft_cap": draw(st.sampled_from([None, 0.0, 30.0])),
        "sliding_window": draw(st.none() | st.integers(1, 500)),
    }
    if draw(st.booleans()):
        params["sinks"] = torch.linspace(-3, 3, num_kv_heads * gqa)
    if draw(st.booleans()):
        params["alibi_slopes"] = torch.linspace(0.01, 0.3, num_kv_heads * gqa)
    return make_step(
        draw(st.sampled_from(sorted(SCHEMES))),
        draw(HEAD_SIZES),
        [context for context, _ in requests],
        [new for _, new in requests],
        num_kv_heads=num_kv_heads,
        gqa=gqa,
        dtype=draw(st.sampled_from(DTYPES)),
        unit_size=unit_size,
        group=group,
        units_per_block=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 2**16)),
        **params,
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(OPERATIONS), st.sampled_from(ISAS))
def test_any_step(data: st.DataObject, operation: str, name: str) -> None:
    before = cpu.isa()
    try:
        cpu.select_isa(name)
    except ValueError:
        return
    try:
        step = data.draw(steps(operation))
        assert_records_match(*sealed_by_both(step), step.cache.fmt)
        assert_attention_matches(step, operation)
    finally:
        cpu.select_isa(before)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(sorted(SCHEMES)),
    st.lists(st.integers(1, 180), min_size=1, max_size=5),
    st.lists(st.integers(1, 180), min_size=1, max_size=5),
)
def test_chunking_is_invisible(name: str, first: list[int], second: list[int]) -> None:
    """The same tokens in other chunks leave the same pages and give the same outputs.

    Chunks of up to 17 tokens, what the ring has room for, run as decode steps.
    """
    total = min(sum(first), sum(second))
    pages, outputs = [], []
    for chunks in (first, second):
        step = make_step(name, 32, (0,), (total,), num_kv_heads=1)
        query, key, value = (x[3:-2] for x in (step.query, step.key, step.value))
        out = torch.empty_like(query)
        start = 0
        for chunk in chunks:
            rows = slice(start, min(start + chunk, total))
            count = rows.stop - rows.start
            if count <= 0:
                break
            batch = Batch(torch.tensor([0, count]), torch.tensor([rows.stop]))
            q, k, v, o = query[rows], key[rows], value[rows], out[rows]
            cpu.seal(k, v, step.cache, batch)
            if count <= 17:
                cpu.write_ring(k, v, step.cache, batch)
                cpu.decode(q, step.cache, batch, step.params, o)
            else:
                cpu.prefill(q, k, v, step.cache, batch, step.params, o)
                cpu.write_ring(k, v, step.cache, batch)
            start = rows.stop
        pages.append(step.cache.pages)
        outputs.append(out)
    assert torch.equal(*pages)
    assert (outputs[0] - outputs[1]).abs().max() <= DECODE_ERROR * outputs[0].abs().max()


# --- the library -----------------------------------------------------------------------------


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let a test load the library anew, and forget that one after it."""
    cpu._load.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    cpu._load.cache_clear()


def test_missing_library(reload: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reload.setenv("KVQ_CPU_LIBRARY", str(tmp_path / "none.so"))
    assert not cpu.is_available()
    assert "not built" in cpu.why_unavailable()
    assert "python -m kvq_kernels.cpu.build" in cpu.why_unavailable()


def test_broken_library(reload: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    reload.setenv("KVQ_CPU_LIBRARY", str(broken))
    assert "cannot be loaded" in cpu.why_unavailable()


def test_stale_library(reload: pytest.MonkeyPatch) -> None:
    reload.setattr(build, "source_hash", lambda: "0123456789abcdef")
    assert "other sources" in cpu.why_unavailable()


def test_isa_from_the_environment(reload: pytest.MonkeyPatch) -> None:
    reload.setenv("KVQ_CPU_ISA", "mmx")
    assert "KVQ_CPU_ISA=mmx" in cpu.why_unavailable()
    cpu._load.cache_clear()
    reload.setenv("KVQ_CPU_ISA", "portable")
    assert cpu.isa() == "portable"


def test_build_without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build(tmp_path / "library.so")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(build.BuildError, match="/nowhere/c"):
        build.build(tmp_path / "library.so")


def test_floating_point_mode_is_left_alone() -> None:
    """A library built with -ffast-math would flush subnormals to zero in the whole process."""
    assert_attention_matches(make_step(), "decode")
    assert (torch.full((100,), 1e-40) * 0.5 > 0).all()


def test_wrong_arguments_are_refused() -> None:
    step = make_step()
    out = step.out(torch.float32)

    def decode(**changes: object) -> None:
        cpu.decode(step.query, dataclasses.replace(step.cache, **changes), step.batch,
                   step.params, out)  # fmt: skip

    decode()
    with pytest.raises(ValueError, match="pages"):
        decode(pages=step.cache.pages.transpose(1, 2))
    with pytest.raises(ValueError, match="do not hold units"):
        decode(fmt=Format.create("kvq-int8", 64, 64))
    with pytest.raises(ValueError, match="ring"):
        decode(ring=step.cache.ring[..., :64])
    with pytest.raises(ValueError, match="ring_capacity"):
        decode(ring_capacity=65)
    with pytest.raises(ValueError, match="int32"):
        decode(block_table=step.cache.block_table.long())
    with pytest.raises(TypeError, match="float64"):
        cpu.decode(step.query.double(), step.cache, step.batch, step.params, out)
    with pytest.raises(ValueError, match="rows"):
        cpu.decode(step.query, step.cache, step.batch, step.params, out[:2])
    with pytest.raises(ValueError, match="Expected"):
        cpu.decode(step.query[..., :32], step.cache, step.batch, step.params, out)
    with pytest.raises(ValueError, match="cannot use"):
        cpu.select_isa("mmx")
