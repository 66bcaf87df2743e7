"""Prefill in Triton against dense attention by the rule.

The cache is filled by the oracle, so that one operation is compared: what prefill reads of it, and
what it makes of that. Free memory is NaN.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.paged import PagedCache, attend_by_the_rule, random_sequence
from triton.runtime.interpreter import InterpretedFunction

from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, reference
from kvq_kernels import triton as triton_kernels

# Largest error over largest output, by dtype of the model.
# fp32: the same arithmetic in another order; a unit in the last place of the larger logits is 4e-6.
# With ALiBi, whose biases make logits of 80 here, the oracle itself is 2.2e-6 from float64 and this
# kernel 1.0e-6 (without: both 1e-6): it is how fp32 rounds a logit of that size, up to 4e-6.
# fp16: sealed keys and values and the softmax's weights are rounded to fp16, half a unit in the
# last place, 2**-11 each; the keys here reach 60, so that of a logit is up to 0.01.
# bf16: the interpreter computes it in fp32, and truncates the output: 2**-7 of it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2**-7}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"soft_cap": 5.0},
    "window 1": {"sliding_window": 1},
    "window 40": {"sliding_window": 40},
    "window 64": {"sliding_window": 64},
    "window 100": {"sliding_window": 100},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "all": {
        "soft_cap": 20.0,
        "sliding_window": 90,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "alibi_slopes": torch.tensor([0.05, 0.025, 0.0125, 0.00625]),
    },
}

ORACLE_AND_PREFILL = SimpleNamespace(
    seal=reference.seal,
    write_ring=reference.write_ring,
    decode=reference.decode,
    prefill=triton_kernels.prefill,
)


def _check(
    fmt: Format,
    heads: tuple[int, int],
    chunks: list[int],
    dtype: torch.dtype = torch.float32,
    units_per_block: int = 1,
    **params: Any,
) -> None:
    """Run one sequence in chunks of more than one token."""
    torch.manual_seed(0)
    attention = AttentionParams(fmt.head_size**-0.5, **params)
    sequence = random_sequence(sum(chunks), *heads, fmt.head_size, dtype)
    cache = PagedCache(
        fmt,
        1,
        heads[1],
        sum(chunks),
        block_size=units_per_block * fmt.unit_size,
        dtype=dtype,
        kernels=ORACLE_AND_PREFILL,
    )
    out = torch.cat([cache.step([sequence], [chunk], attention)[0] for chunk in chunks])
    expected = attend_by_the_rule(sequence, fmt, attention)
    error = (out - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", SCHEMES)
def test_features(name: str, feature: str) -> None:
    fmt = Format.create(name, 64, unit_size=64, key_group_size=32)
    _check(fmt, (4, 2), [70, 2, 71], **FEATURES[feature])


@pytest.mark.parametrize(
    ("name", "head_size", "heads", "dtype"),
    [
        ("kvq-int4", 16, (2, 1), torch.float32),
        ("kvq-int4", 80, (3, 1), torch.float16),
        ("kvq-int4", 96, (1, 1), torch.bfloat16),
        ("kvq-int4", 128, (4, 1), torch.float16),
        ("kvq-int4", 192, (6, 1), torch.float32),
        ("kvq-int4", 256, (5, 1), torch.float16),
        ("kvq-k8v4", 96, (8, 1), torch.float16),
        ("kvq-k8v4", 128, (2, 2), torch.bfloat16),
        ("kvq-k8v4", 256, (2, 1), torch.float32),
        ("kvq-int8", 64, (16, 1), torch.float16),
        ("kvq-int8", 112, (12, 1), torch.float32),
        ("kvq-int8", 256, (2, 1), torch.bfloat16),
    ],
)
def test_head_sizes_groupings_and_dtypes(
    name: str, head_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    _check(Format.create(name, head_size, unit_size=64), heads, [130, 5], dtype)


@pytest.mark.parametrize(
    ("name", "unit_size", "group_size", "units_per_block"),
    [
        ("kvq-int4", 128, 128, 2),
        ("kvq-int4", 256, 64, 1),
        ("kvq-int4", 256, 256, 1),
        ("kvq-k8v4", 128, 32, 3),
        ("kvq-int8", 256, 256, 1),
    ],
)
def test_unit_group_and_page_sizes(
    name: str, unit_size: int, group_size: int, units_per_block: int
) -> None:
    fmt = Format(name, 64, unit_size, group_size)
    _check(fmt, (2, 1), [unit_size + 5, unit_size - 4], units_per_block=units_per_block)


@pytest.mark.parametrize("chunks", [[64], [63, 2], [2] * 4, [128, 128], [191, 3]], ids=str)
def test_odd_lengths(chunks: list[int]) -> None:
    _check(Format.create("kvq-int4", 64, unit_size=64), (2, 1), chunks)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_whole_step_of_triton_kernels(name: str) -> None:
    """Prefills of any length beside decodes, rows that start late, and a request with none."""
    torch.manual_seed(0)
    fmt = Format.create(name, 64, unit_size=64)
    params = AttentionParams(0.125)
    lengths = [150, 66, 40, 130]
    sequences = [random_sequence(n, 2, 1, 64) for n in lengths]
    expected = [attend_by_the_rule(sequence, fmt, params) for sequence in sequences]
    kernels = SimpleNamespace(
        seal=triton_kernels.seal,
        write_ring=triton_kernels.write_ring,
        decode=reference.decode,
        prefill=triton_kernels.prefill,
    )
    cache = PagedCache(fmt, 4, 1, 150, block_size=128, kernels=kernels)
    for chunks in ([63, 64, 10, 0], [86, 1, 30, 130], [1, 1, 0, 0]):
        starts = [sequence.computed for sequence in sequences]
        outs = cache.step(sequences, chunks, params)
        for out, whole, start, chunk in zip(outs, expected, starts, chunks, strict=True):
            # A code on the edge may differ by one: 1e-3 of the output with 4 bits.
            torch.testing.assert_close(out, whole[start : start + chunk], atol=2e-3, rtol=0)


def test_rows_of_others_are_left_alone() -> None:
    """A batch whose rows start late, with empty requests; strided queries and outputs."""
    torch.manual_seed(0)
    fmt = Format.create("kvq-int4", 64, unit_size=64)
    cache = PagedCache(fmt, 3, 1, 70, block_size=64)
    sequence = random_sequence(80, 2, 1, 64)
    batch = Batch(torch.tensor([3, 3, 73, 73]), torch.tensor([0, 70, 0]))
    query = torch.randn(80, 3, 128)[:, :2, 64:]
    out = torch.full((80, 3, 128), 7.0)[:, :2, 64:]
    expected = out.clone()
    reference.seal(sequence.key, sequence.value, cache.cache, batch)
    tensors = (query, sequence.key, sequence.value, cache.cache, batch, AttentionParams(0.1))
    triton_kernels.prefill(*tensors, out)
    reference.prefill(*tensors, expected)
    assert (out[:3] == 7).all()
    assert (out[73:] == 7).all()
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_keys_and_values_beyond_fp16_leave_the_output_finite(name: str, dtype: torch.dtype) -> None:
    """The largest code of a range that ends at fp16's largest number dequantises beyond it."""
    torch.manual_seed(0)
    fmt = Format.create(name, 64, unit_size=64)
    sequence = random_sequence(70, 1, 1, 64, dtype)
    largest = torch.finfo(torch.float16).max
    sequence.key[5, 0, 7], sequence.key[6, 0, 7] = largest, -largest
    sequence.value[5, 0, 7], sequence.value[6, 0, 8] = largest, -largest
    sequence.query[:, 0, 7] = 0.0  # that channel would decide everything
    cache = PagedCache(fmt, 1, 1, 70, block_size=64, dtype=dtype, kernels=ORACLE_AND_PREFILL)
    params = AttentionParams(0.125)
    out = cache.step([sequence], [70], params)[0]
    expected = attend_by_the_rule(sequence, fmt, params)
    assert out[64:].isfinite().all()
    error = (out - expected)[64:].abs().max() / expected[64:].abs().max()
    assert error <= TOLERANCE[dtype]


def test_bad_values_stay_within_their_request() -> None:
    torch.manual_seed(0)
    fmt = Format.create("kvq-int4", 64, unit_size=64)
    params = AttentionParams(scale=0.125)
    good, bad = random_sequence(100, 2, 1, 64), random_sequence(100, 2, 1, 64)
    bad.key[30, 0, 5], bad.value[31, 0, 6] = torch.nan, torch.inf
    cache = PagedCache(fmt, 2, 1, 100, block_size=64, kernels=triton_kernels)
    good_out, bad_out = cache.step([good, bad], [100, 100], params)
    torch.testing.assert_close(good_out, attend_by_the_rule(good, fmt, params), atol=2e-3, rtol=0)
    assert bad_out[30:64].isnan().any()  # unquantised, it behaves as in a 16-bit cache
    assert bad_out[64:].isfinite().all()


def test_keys_of_another_dtype_than_the_ring_are_refused() -> None:
    cache = PagedCache(Format.create("kvq-int4", 64, 64), 1, 1, 64, block_size=64).cache
    x = torch.zeros(2, 1, 64, dtype=torch.float16)
    batch = Batch(torch.tensor([0, 2]), torch.tensor([2]))
    with pytest.raises(TypeError, match=r"ring of torch.float32"):
        triton_kernels.prefill(x, x, x, cache, batch, AttentionParams(1.0), x)


# --- launches --------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    names = []
    run = InterpretedFunction.run

    def record(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return names


def test_launches_per_layer(launches: list[str]) -> None:
    """Three for a step of decodes, three for one of prefills, six for one of both."""
    torch.manual_seed(0)
    fmt = Format.create("kvq-int4", 64, unit_size=64)
    cache = PagedCache(fmt, 2, 1, 128, block_size=64).cache
    sequence = random_sequence(70, 2, 1, 64)
    query, key, value, out = sequence.query, sequence.key, sequence.value, sequence.query.clone()
    params = AttentionParams(0.1)
    decodes = Batch(torch.tensor([0, 1, 2]), torch.tensor([1, 1]))
    prefills = Batch(torch.tensor([2, 70]), torch.tensor([68]))

    triton_kernels.store(key, value, cache, decodes)
    triton_kernels.decode(query, cache, decodes, params, out)
    assert len(launches) == 3

    launches.clear()
    part = cache.requests(1, 2)
    triton_kernels.seal(key, value, part, prefills)
    triton_kernels.prefill(query, key, value, part, prefills, params, out)
    triton_kernels.write_ring(key, value, part, prefills)
    assert launches == ["_seal_kernel", "_prefill_kernel", "_write_ring_kernel"]
