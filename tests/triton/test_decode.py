"""Triton's decode against the oracle, on the same cache.

Free memory is poisoned: unused records are 0xFF (fp16 NaN), unused ring slots NaN, and table
entries that nothing may follow name a block of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from kvq_kernels import AttentionParams, Batch, Format, LayerCache, reference
from kvq_kernels.triton import tuning
from kvq_kernels.triton.decode import decode, workspace_bytes

# Largest error over largest output, in the rows that are written. The kernel rounds query times
# scale and weight times scale to fp16, 2^-12 each at most. A logit's error enters the weight whole,
# and a weight's error is multiplied by a code of up to 15 steps where the value itself, code and
# zero together, is a few. Seen: 2.9e-3 with 4-bit values, 1.1e-3 with 8-bit ones.
KERNEL_ERROR = {4: 4e-3, 8: 1.5e-3}  # by the bits of a value
# On top, both round their output once; the interpreter cuts fp32 to bf16 instead.
LAST_PLACE = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-7}

UNTOUCHED = -77.0


@dataclass
class Step:
    """A batch after seal and ring write, and the queries of its new tokens."""

    cache: LayerCache
    batch: Batch
    query: torch.Tensor
    params: AttentionParams

    def out(self) -> torch.Tensor:
        return torch.full_like(self.query, UNTOUCHED)

    def check(self) -> torch.Tensor:
        """Compare with the oracle, and return the kernel's output."""
        expected, actual = self.out(), self.out()
        reference.decode(self.query, self.cache, self.batch, self.params, expected)
        decode(self.query, self.cache, self.batch, self.params, actual)
        assert torch.equal(actual == UNTOUCHED, expected == UNTOUCHED), "other rows were written"
        written = expected != UNTOUCHED
        expected, given = expected[written].float(), actual[written].float()
        error = (given - expected).abs().max() / expected.abs().max()
        bound = KERNEL_ERROR[self.cache.fmt.value_bits] + LAST_PLACE[actual.dtype]
        assert error <= bound
        return actual


def make_step(
    name: str = "kvq-int4",
    head_size: int = 64,
    contexts: Sequence[int] = (130,),
    new: Sequence[int] = (1,),
    *,
    num_kv_heads: int = 1,
    gqa: int = 2,
    dtype: torch.dtype = torch.float32,
    unit_size: int = 64,
    group: int | None = None,
    units_per_block: int = 1,
    ring_block: int = 16,
    extra_ring_blocks: int = 0,
    first_row: int = 0,
    key_factor: float = 1.0,
    value_factor: float = 1.0,
    query_factor: float = 1.0,
    damaged: bool = False,
    **params: object,
) -> Step:
    """Return requests with `contexts` tokens each and `new` tokens on top, stored by the oracle.

    Keys have outlier channels and the first token stands apart, as in real models. Queries look
    its way, and the scale undoes the factors, so that it and many other tokens have weight.
    `first_row` rows of the queries belong to others.
    """
    torch.manual_seed(0)
    fmt = Format.create(name, head_size, unit_size, group)
    block_size = unit_size * units_per_block
    totals = [a + b for a, b in zip(contexts, new, strict=True)]
    width = max(1, -(-max(totals) // block_size))
    capacity = unit_size + extra_ring_blocks * ring_block
    ring_width = capacity // ring_block
    num_requests = len(totals)
    num_blocks = num_requests * (width + ring_width) + 1
    order = torch.randperm(num_blocks - 1, dtype=torch.int32).view(num_requests, -1)

    # Every other block belongs to another layer: only the inner three dimensions are contiguous.
    pages = torch.full((2 * num_blocks, num_kv_heads, block_size, fmt.bytes_per_token), 0xFF)
    ring = torch.full((2 * num_blocks, num_kv_heads, ring_block, 2 * head_size), torch.nan)
    cache = LayerCache(
        fmt,
        pages.to(torch.uint8)[1::2],
        order[:, :width].contiguous(),
        ring.to(dtype)[::2],
        order[:, width:].contiguous(),
        capacity,
    )
    key = torch.randn(sum(totals), num_kv_heads, head_size)
    key[..., 1] += 12
    key[..., head_size // 2] *= 6
    starts = torch.tensor([0, *totals]).cumsum(0)
    key[starts[:-1].clamp(max=len(key) - 1)] *= 4
    rows = torch.tensor([first_row, *new]).cumsum(0).int()
    query = torch.randn(int(rows[-1]) + 2, num_kv_heads * gqa, head_size) / 4
    for request, first in enumerate(starts[:-1].clamp(max=len(key) - 1)):
        toward = key[first] * (6 * head_size**0.5 / key[first].norm(dim=-1, keepdim=True) ** 2)
        query[rows[request] : rows[request + 1]] += toward.repeat_interleave(gqa, 0)
    key, value = (key * key_factor).to(dtype), torch.randn_like(key) * value_factor
    if damaged:
        key[3, 0, 5], key[7, 0, 2], value[9, 0, 1] = torch.nan, torch.inf, -torch.inf
        value[11, 0, 3] = torch.nan
    stored = Batch(starts.int(), torch.tensor(totals, dtype=torch.int32))
    reference.seal(key, value.to(dtype), cache, stored)
    reference.write_ring(key, value.to(dtype), cache, stored)

    scale = head_size**-0.5 / (key_factor * query_factor)
    attention = AttentionParams(scale, **params)
    poison_unreadable(cache, attention, contexts, totals)
    query = (query * query_factor).to(dtype)
    return Step(cache, Batch(rows, stored.seq_lens), query, attention)


def poison_unreadable(
    cache: LayerCache, params: AttentionParams, contexts: Sequence[int], totals: Sequence[int]
) -> None:
    """Poison the units below the window, and name a poisoned block where there is none to read."""
    fmt, poisoned = cache.fmt, cache.pages.shape[0] - 1
    per_block = cache.pages.shape[2] // fmt.unit_size
    records = reference._records(cache)
    for request, (start, end) in enumerate(zip(contexts, totals, strict=True)):
        lowest = params.lowest_position(start) // fmt.unit_size
        for unit in range(lowest):
            records[cache.block_table[request, unit // per_block], :, unit % per_block] = 0xFF
        cache.block_table[request, : lowest // per_block] = poisoned
        cache.block_table[request, -(-end // (per_block * fmt.unit_size)) :] = poisoned


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["kvq-int4", "kvq-k8v4", "kvq-int8"])
def test_formats_and_head_sizes(name: str, head_size: int) -> None:
    make_step(name, head_size, contexts=(150, 5), new=(1, 1)).check()


@pytest.mark.parametrize("head_size", [16, 32, 48, 112])
def test_other_head_sizes(head_size: int) -> None:
    make_step(head_size=head_size).check()


@pytest.mark.parametrize("gqa", [1, 3, 6, 8, 12, 16])
def test_gqa(gqa: int) -> None:
    make_step(gqa=gqa, num_kv_heads=2, dtype=torch.float16).check()  # fp32 has 8 rows at most


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["kvq-int4", "kvq-int8"])
def test_sixteen_bit_models(name: str, dtype: torch.dtype) -> None:
    make_step(name, dtype=dtype, contexts=(200, 63), new=(1, 1)).check()


def test_lengths_around_units() -> None:
    contexts = (0, 1, 62, 63, 64, 127, 128, 191)
    make_step(contexts=contexts, new=(1,) * len(contexts), gqa=1).check()


def test_padding_and_rows_of_others() -> None:
    make_step(contexts=(0, 70, 0, 3, 0), new=(0, 1, 0, 1, 0), first_row=3).check()


def test_dummy_tokens_touch_nothing() -> None:
    """A warm-up batch has new tokens but length 0."""
    step = make_step(contexts=(0, 70), new=(2, 1), extra_ring_blocks=1)
    step.batch.seq_lens[0] = 0
    out = step.out()
    decode(step.query, step.cache, step.batch, step.params, out)
    assert (out[:2] == UNTOUCHED).all()
    assert out[2].isfinite().all()
    assert (out[2] != UNTOUCHED).all()


@pytest.mark.parametrize(
    ("contexts", "new"),
    [((60,), (4,)), ((61,), (4,)), ((63,), (5,)), ((126, 70, 0), (5, 1, 17)), ((120,), (17,))],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 40])
def test_speculative_tokens_around_a_unit(
    contexts: tuple[int, ...], new: tuple[int, ...], window: int | None
) -> None:
    """Rows of the second unit read the first one sealed, the others read it from the ring."""
    step = make_step(contexts=contexts, new=new, extra_ring_blocks=1, gqa=3, sliding_window=window)
    step.check()


@pytest.mark.parametrize("window", [1, 17, 64, 100, 1000])
@pytest.mark.parametrize("units_per_block", [1, 2])
def test_sliding_window(window: int, units_per_block: int) -> None:
    make_step(
        contexts=(230, 40), new=(1, 1), sliding_window=window, units_per_block=units_per_block
    ).check()


def test_soft_cap() -> None:
    make_step(soft_cap=5.0).check()


def test_sinks() -> None:
    make_step(contexts=(130, 9), new=(1, 1), sinks=torch.tensor([2.0, -1.0])).check()


def test_alibi() -> None:
    make_step(alibi_slopes=torch.tensor([0.05, 0.4])).check()


def test_everything_at_once() -> None:
    make_step(
        contexts=(190, 62),
        new=(4, 3),
        extra_ring_blocks=1,
        units_per_block=2,
        soft_cap=20.0,
        sliding_window=90,
        sinks=torch.tensor([0.5, 0.0]),
        alibi_slopes=torch.tensor([0.02, 0.3]),
    ).check()


@pytest.mark.parametrize(
    ("name", "unit_size", "group", "units_per_block"),
    [
        ("kvq-int4", 64, 32, 4),
        ("kvq-int4", 128, 64, 2),
        ("kvq-int4", 128, 128, 1),
        ("kvq-int4", 256, 64, 1),
        ("kvq-int4", 256, 256, 1),
        ("kvq-k8v4", 128, 32, 1),
        ("kvq-k8v4", 256, 256, 1),
        ("kvq-int8", 128, 128, 2),
    ],
)
def test_units_groups_and_blocks(
    name: str, unit_size: int, group: int, units_per_block: int
) -> None:
    make_step(
        name,
        contexts=(2 * unit_size + 9,),
        unit_size=unit_size,
        group=group,
        units_per_block=units_per_block,
        gqa=1,
    ).check()


def test_ring_blocks_of_any_size() -> None:
    make_step(contexts=(100,), ring_block=8).check()


@pytest.mark.parametrize("min_tiles", [1, 2])
def test_splits(min_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of unlike length share a grid; short ones leave splits unused."""
    monkeypatch.setitem(tuning.OVERRIDES, "decode", {"min_tiles_per_split": min_tiles})
    make_step(contexts=(700, 65, 3), new=(1, 1, 1), gqa=1).check()


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a tile may be half of the tokens that share their cuts, but not twice as many."""
    monkeypatch.setitem(tuning.OVERRIDES, "decode", {"tile": tile})
    step = make_step(contexts=(130,), unit_size=128, gqa=1)
    if tile <= 64:
        step.check()
    else:
        with pytest.raises(ValueError, match="up to 64"):
            step.check()


@pytest.mark.parametrize("name", ["kvq-int4", "kvq-k8v4", "kvq-int8"])
@pytest.mark.parametrize(
    ("key_factor", "query_factor"), [(1e-3, 1.0), (1e3, 1e-3), (1e-3, 1e3), (1e3, 1e3)]
)
def test_extreme_keys_and_queries(name: str, key_factor: float, query_factor: float) -> None:
    """Query times scale leaves fp16's range in the last case, and sinks under it in the first."""
    make_step(name, key_factor=key_factor, query_factor=query_factor, gqa=1).check()


@pytest.mark.parametrize("value_factor", [1e-6, 1e-3, 1e4])
def test_extreme_values(value_factor: float) -> None:
    make_step(value_factor=value_factor, contexts=(191,), gqa=1).check()


def test_damaged_elements_poison_nothing() -> None:
    """NaN and infinities among the sealed tokens are stored as finite numbers."""
    assert make_step(damaged=True).check()[:1].isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaNs
def test_a_damaged_query_spoils_its_own_row_alone() -> None:
    step = make_step(gqa=4)
    healthy = step.out()
    decode(step.query, step.cache, step.batch, step.params, healthy)
    step.query[0, 1, 3], step.query[0, 2, 5] = torch.nan, torch.inf
    damaged = step.out()
    decode(step.query, step.cache, step.batch, step.params, damaged)
    # Queries share the factor that keeps them in fp16: the infinity costs its neighbours bits.
    assert torch.allclose(damaged[0, ::3], healthy[0, ::3], atol=0.03)


def test_strided_queries_and_outputs() -> None:
    """Queries are a slice of the fused projection's output."""
    step = make_step(contexts=(100, 70), new=(1, 1))
    rows, heads, head_size = step.query.shape
    fused = torch.full((rows, heads + 2, head_size), torch.nan)
    fused[:, :heads] = step.query
    step.query = fused[:, :heads]
    step.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("new", [(4, 4), (1,)])
def test_decode_takes_no_more_than_workspace_bytes(
    new: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(contexts=(200, 70)[: len(new)], new=new, dtype=dtype, extra_ring_blocks=1)
    stated = workspace_bytes(
        step.cache.fmt,
        max_num_requests=2,
        max_query_len=4,
        num_heads=2,
        num_kv_heads=1,
        max_model_len=4 * 64,
        device=step.query.device,
    )
    taken = []

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        taken.append(plain(*args, **kwargs))
        return taken[-1]

    plain, out = torch.empty, step.out()[: sum(new)]
    monkeypatch.setattr(torch, "empty", empty)
    decode(step.query[: sum(new)], step.cache, step.batch, step.params, out)
    num_bytes = sum(tensor.nbytes for tensor in taken)
    assert 0 < num_bytes <= stated
    if (new, dtype) == ((4, 4), torch.float16):
        assert num_bytes == stated


def test_heads_that_do_not_fit_are_refused() -> None:
    step = make_step(num_kv_heads=2)
    with pytest.raises(ValueError, match="3 heads"):
        decode(step.query[:, :3], step.cache, step.batch, step.params, step.out()[:, :3])
