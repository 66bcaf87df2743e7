"""Sealing and writing the ring in Triton, byte for byte against the oracle."""

import dataclasses

import pytest
import torch
from support.paged import PagedCache, Sequence, random_sequence

from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, LayerCache, reference
from kvq_kernels import triton as triton_kernels


class StoreOnly:
    """Kernels of one step without attention."""

    def __init__(self, kernels: object) -> None:
        self.seal, self.write_ring = kernels.seal, kernels.write_ring

    def prefill(self, *_: object) -> None:
        pass

    decode = prefill


def _run(
    kernels: object, fmt: Format, sequences: list[Sequence], steps: list[list[int]], **cache: object
) -> PagedCache:
    """Run a schedule, the new tokens of each sequence in each step, on a cache of its own."""
    torch.manual_seed(1)  # the same scattered blocks for all kernels
    num_kv_heads = sequences[0].key.shape[1]
    longest = max(len(sequence.key) for sequence in sequences)
    paged = PagedCache(
        fmt, len(sequences), num_kv_heads, longest, kernels=StoreOnly(kernels), **cache
    )
    for sequence in sequences:
        sequence.computed = 0
    for new_tokens in steps:
        paged.step(sequences, new_tokens, AttentionParams(1.0))
    return paged


def _values_mask(fmt: Format) -> torch.Tensor:
    """Which bytes of a record hold value codes and which hold value scales and zeros."""
    mask = torch.zeros(2, fmt.record_bytes, dtype=torch.bool)
    for blob in range(fmt.num_blobs):
        codes = blob * fmt.blob_bytes + fmt.value_codes_offset
        meta = blob * fmt.blob_bytes + fmt.value_meta_offset
        mask[0, codes : codes + fmt.value_codes_bytes] = True
        mask[1, meta : meta + fmt.value_meta_bytes] = True
    return mask


def _assert_same_pages(actual: torch.Tensor, expected: torch.Tensor, fmt: Format) -> None:
    """Compare pages ``[num_blocks, num_kv_heads, block_size, bytes_per_token]``.

    Everything is the oracle's to the bit but rotated values: a sum in another order differs by
    about 1e-6 of the token's largest value. So a code may be off by one, which takes a value that
    close to the middle between two codes: one in thousands. Or a scale by a unit in its last place.
    """
    assert expected.ne(0xFF).any(), "nothing was sealed"
    shape = (*expected.shape[:2], -1, fmt.record_bytes)
    actual, expected = actual.reshape(shape), expected.reshape(shape)
    if not fmt.rotate_values:
        assert torch.equal(actual, expected)
        return
    codes, meta = _values_mask(fmt)
    assert torch.equal(actual[..., ~(codes | meta)], expected[..., ~(codes | meta)])
    a, b = actual[..., codes].int(), expected[..., codes].int()
    if fmt.value_bits == 4:
        a, b = torch.cat([a & 15, a >> 4]), torch.cat([b & 15, b >> 4])
    assert (a - b).abs().max() <= 1
    assert (a != b).float().mean() < 1e-3
    a = actual[..., meta].contiguous().view(torch.int16).int()
    b = expected[..., meta].contiguous().view(torch.int16).int()
    assert (a - b).abs().max() <= 1


def _assert_same(actual: PagedCache, expected: PagedCache) -> None:
    _assert_same_pages(actual.cache.pages, expected.cache.pages, expected.fmt)
    # As bits, since free slots hold NaN.
    bits = torch.int32 if expected.dtype == torch.float32 else torch.int16
    rings = (x.cache.ring.contiguous().view(bits) for x in (actual, expected))
    assert torch.equal(*rings)


CASES = [
    (Format("kvq-int4", 64, 64, 32), torch.float32),
    (Format("kvq-int4", 96, 64, 64), torch.bfloat16),
    (Format("kvq-int4", 80, 128, 32), torch.float16),
    (Format("kvq-int4", 16, 256, 256), torch.bfloat16),
    (Format("kvq-int4", 128, 128, 64), torch.bfloat16),
    (Format("kvq-int4", 64, 256, 256), torch.float16),
    (Format("kvq-int4", 256, 64, 64), torch.float16),
    (Format("kvq-k8v4", 64, 64, 32), torch.float16),
    (Format("kvq-k8v4", 128, 64, 64), torch.bfloat16),
    (Format("kvq-k8v4", 112, 128, 64), torch.float32),
    (Format("kvq-k8v4", 192, 64, 64), torch.bfloat16),
    (Format("kvq-int8", 64, 64, 64), torch.bfloat16),
    (Format("kvq-int8", 80, 64, 32), torch.float16),
    (Format("kvq-int8", 256, 128, 128), torch.float32),
]


def _id(case: object) -> str:
    if isinstance(case, Format):
        return f"{case.name}-D{case.head_size}-U{case.unit_size}-g{case.key_group_size}"
    return str(case)


@pytest.mark.parametrize(("fmt", "dtype"), CASES, ids=_id)
def test_records_and_ring_equal_the_oracles(fmt: Format, dtype: torch.dtype) -> None:
    """A first chunk that fills a unit and a bit, one that completes the next from ring and step."""
    torch.manual_seed(0)
    unit = fmt.unit_size
    sequences = [random_sequence(2 * unit + 3, 2, 2, fmt.head_size, dtype)]
    steps = [[unit + 9], [unit - 6]]
    caches = [
        _run(kernels, fmt, sequences, steps, block_size=2 * unit, dtype=dtype)
        for kernels in (triton_kernels, reference)
    ]
    _assert_same(*caches)


@pytest.mark.parametrize("name", SCHEMES)
def test_batches_of_requests_of_any_length(name: str) -> None:
    """Requests that complete no unit, one, and several; long chunks pass the ring's capacity."""
    torch.manual_seed(0)
    fmt = Format.create(name, 64, unit_size=64)
    sequences = [random_sequence(n, 1, 1, 64) for n in (200, 63, 64, 130)]
    steps = [[200, 5, 60, 0], [0, 57, 0, 1], [0, 1, 4, 129]]
    caches = [
        _run(kernels, fmt, sequences, steps, block_size=64, ring_block_size=16)
        for kernels in (triton_kernels, reference)
    ]
    _assert_same(*caches)


@pytest.mark.parametrize("name", SCHEMES)
def test_any_chunking_seals_the_same_bytes(name: str) -> None:
    """Not only nearly: a unit is sealed by the same arithmetic wherever its tokens come from."""
    torch.manual_seed(0)
    fmt = Format.create(name, 96, unit_size=64, key_group_size=32)
    sequences = [random_sequence(200, 1, 1, 96, torch.float16)]
    pages = [
        _run(triton_kernels, fmt, sequences, steps, block_size=64, dtype=torch.float16).cache.pages
        for steps in ([[200]], [[63], [1], [1], [100], [35]])
    ]
    assert pages[0].ne(0xFF).any()
    assert torch.equal(*pages)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "special",
    [
        "nan",
        "inf",
        "beyond fp16",
        "constant",
        "denormal",
        "bias",
        "all nan",
        "first key",
        "nothing to cut by",
        "parts far apart",
    ],
)
def test_special_values(name: str, special: str) -> None:
    torch.manual_seed(0)
    fmt = Format.create(name, 64, unit_size=64)
    sequence = random_sequence(64, 1, 1, 64)
    key, value = sequence.key, sequence.value
    if special == "nan":
        key[10, 0, 20], value[11, 0, 21] = torch.nan, torch.nan
    elif special == "inf":
        key[10, 0, 20], value[11, 0, 21] = torch.inf, -torch.inf
    elif special == "beyond fp16":
        key[3, 0, 4], value[3, 0, 4] = 1e30, -1e30
    elif special == "constant":
        key[..., ::3], value[5] = -1.25, 0.0
    elif special == "denormal":
        key *= 1e-7
        value *= 1e-7
    elif special == "bias":
        key += 50
    elif special == "all nan":
        key[:], value[:] = torch.nan, torch.nan
    elif special == "nothing to cut by":  # the second 32 tokens have no finite key
        key[32:, 0, :32], key[32:, 0, 32:] = torch.nan, torch.inf
    elif special == "parts far apart":  # more than 15/32 of the range to cut at either end
        key[:32] *= 1e-2
        key[32:] = 100 + key[32:] * 1e-2
    elif special == "first key":
        key[0, 0, :8] = torch.tensor([1e4, -1e4, torch.nan, torch.inf, -torch.inf, 1e30, 0, 3])
    caches = [
        _run(kernels, fmt, [sequence], [[64]], block_size=64)
        for kernels in (triton_kernels, reference)
    ]
    _assert_same(*caches)


@dataclasses.dataclass
class DecodeStep:
    """A batch in the middle of decoding, with rows of others and empty requests around it."""

    cache: LayerCache
    batch: Batch
    key: torch.Tensor
    value: torch.Tensor

    def copy(self) -> LayerCache:
        return dataclasses.replace(
            self.cache, pages=self.cache.pages.clone(), ring=self.cache.ring.clone()
        )


def _decode_step(fmt: Format, contexts: list[int], new: list[int]) -> DecodeStep:
    torch.manual_seed(2)
    sequences = [random_sequence(c, 1, 2, fmt.head_size) for c in contexts]
    paged = _run(
        reference,
        fmt,
        sequences,
        [contexts],
        block_size=2 * fmt.unit_size,
        num_speculative_tokens=16,
    )
    cache = dataclasses.replace(
        paged.cache,
        # Requests of no tokens, as padding of CUDA graphs, have tables of any content.
        block_table=torch.nn.functional.pad(paged.cache.block_table, (0, 0, 0, 2), value=2**30),
        ring_table=torch.nn.functional.pad(paged.cache.ring_table, (0, 0, 0, 2), value=2**30),
    )
    lengths = torch.tensor([3, *new, 0, 0])  # three rows of others come first
    seq_lens = torch.tensor([c + n for c, n in zip(contexts, new, strict=True)] + [0, 0])
    rows = 3 + sum(new) + 2
    fused = torch.randn(rows, 2, 3 * fmt.head_size)  # rows of a fused tensor
    return DecodeStep(
        cache,
        Batch(lengths.cumsum(0).int(), seq_lens.int()),
        fused[..., fmt.head_size : 2 * fmt.head_size],
        fused[..., 2 * fmt.head_size :],
    )


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("new", [[1, 1, 1, 1], [1, 33, 32, 7]], ids=["one token", "drafts"])
def test_store_is_seal_and_write_ring(name: str, new: list[int]) -> None:
    """Contexts at the end of a unit, one token before it, at the start, and with a long way to go.

    33 = 1 + ring capacity - unit size is the most that a decode step may bring.
    """
    fmt = Format.create(name, 64, unit_size=64)
    step = _decode_step(fmt, [63, 127, 64, 20], new)
    assert 1 + step.cache.ring_capacity - fmt.unit_size == 33
    expected, fused, apart = step.copy(), step.copy(), step.copy()
    reference.store(step.key, step.value, expected, step.batch)
    triton_kernels.store(step.key, step.value, fused, step.batch)
    triton_kernels.seal(step.key, step.value, apart, step.batch)
    triton_kernels.write_ring(step.key, step.value, apart, step.batch)
    assert not torch.equal(expected.pages, step.cache.pages)
    assert torch.equal(fused.pages, apart.pages)
    _assert_same_pages(fused.pages, expected.pages, fmt)
    for cache in (fused, apart):
        assert torch.equal(cache.ring.view(torch.int32), expected.ring.view(torch.int32))


def test_nothing_to_do_touches_nothing() -> None:
    fmt = Format.create("kvq-int4", 64, unit_size=64)
    step = _decode_step(fmt, [20], [1])
    cache, nobody = step.copy(), Batch(torch.tensor([3, 3, 3, 3]), torch.tensor([20, 0, 64]))
    cache = dataclasses.replace(cache, block_table=torch.full((3, 1), 2**30, dtype=torch.int32))
    triton_kernels.store(step.key, step.value, cache, nobody)
    triton_kernels.seal(step.key, step.value, cache, nobody)
    triton_kernels.write_ring(step.key, step.value, cache, nobody)
    assert torch.equal(cache.pages, step.cache.pages)
    assert torch.equal(cache.ring.view(torch.int32), step.cache.ring.view(torch.int32))
    empty = Batch(torch.tensor([3]), torch.tensor([], dtype=torch.int32))
    triton_kernels.store(step.key, step.value, cache, empty)


@pytest.mark.parametrize("operation", ["seal", "store", "write_ring"])
def test_tokens_of_another_dtype_than_the_ring_are_refused(operation: str) -> None:
    step = _decode_step(Format.create("kvq-int4", 64, unit_size=64), [20], [1])
    with pytest.raises(TypeError, match=r"ring of torch.float32 cannot hold torch.float16"):
        getattr(triton_kernels, operation)(
            step.key.half(), step.value.half(), step.cache, step.batch
        )
