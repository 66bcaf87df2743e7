"""The oracle's paged operations against dense attention by the rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged import PagedCache, Sequence, attend_by_the_rule, random_sequence

from kvq_kernels import SCHEMES, AttentionParams, Format
from kvq_kernels.reference import attention

# fp32 sums in another order: a few units in the last place of outputs of size about 1.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}

FEATURES = {
    "plain": {},
    "soft cap": {"soft_cap": 5.0},
    "window 1": {"sliding_window": 1},
    "window 100": {"sliding_window": 100},
    "window 128": {"sliding_window": 128},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 3.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01])},
}


def _naive_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """One query, one key at a time, in Python floats."""
    num_tokens, num_heads, _ = query.shape
    group = num_heads // key.shape[1]
    out = torch.zeros_like(query)
    for i in range(num_tokens):
        for head in range(num_heads):
            lowest = 0
            if params.sliding_window is not None:
                lowest = max(0, i - params.sliding_window + 1)
            logits = []
            for j in range(lowest, i + 1):
                logit = params.scale * float(query[i, head] @ key[j, head // group])
                if params.soft_cap is not None:
                    logit = params.soft_cap * math.tanh(logit / params.soft_cap)
                if params.alibi_slopes is not None:
                    logit += float(params.alibi_slopes[head]) * (j - i)
                logits.append(logit)
            top = max(logits)
            weights = [math.exp(logit - top) for logit in logits]
            total = sum(weights)
            if params.sinks is not None:
                total += math.exp(float(params.sinks[head]) - top)
            for j, weight in zip(range(lowest, i + 1), weights, strict=True):
                out[i, head] += weight / total * value[j, head // group]
    return out


@pytest.mark.parametrize("feature", FEATURES)
def test_attention_equals_a_loop_over_keys(feature: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(20, 6, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    params = AttentionParams(scale=0.25, **FEATURES[feature])
    expected = _naive_attention(query.double(), key.double(), value.double(), params)
    result = attention(query, key, value, params, query_start=0, key_start=0)
    torch.testing.assert_close(result, expected.float(), **TOLERANCE)


def test_attention_of_a_suffix_of_queries_and_keys() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(20, 2, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    params = AttentionParams(scale=0.25, sliding_window=4)
    whole = attention(query, key, value, params, 0, 0)
    part = attention(query[12:], key[9:], value[9:], params, query_start=12, key_start=9)
    torch.testing.assert_close(part, whole[12:], **TOLERANCE)


def _run_schedule(
    cache: PagedCache, sequence: Sequence, chunks: list[int], params: AttentionParams
) -> torch.Tensor:
    return torch.cat([cache.step([sequence], [chunk], params)[0] for chunk in chunks])


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "chunks", [[300], [63, 1, 1, 64, 17, 154], [97, 97, 97, 9], [290] + [1] * 10], ids=str
)
def test_any_chunking_equals_the_rule(name: str, feature: str, chunks: list[int]) -> None:
    torch.manual_seed(0)
    fmt = Format.create(name, 64, unit_size=64)
    params = AttentionParams(scale=64**-0.5, **FEATURES[feature])
    sequence = random_sequence(300, 6, 2, 64)
    cache = PagedCache(fmt, 1, 2, 300, block_size=128)
    out = _run_schedule(cache, sequence, chunks, params)
    torch.testing.assert_close(out, attend_by_the_rule(sequence, fmt, params), **TOLERANCE)


@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_head_sizes_and_groupings(name: str, heads: tuple[int, int], head_size: int) -> None:
    torch.manual_seed(0)
    fmt = Format.create(name, head_size, unit_size=64)
    params = AttentionParams(scale=head_size**-0.5)
    sequence = random_sequence(140, *heads, head_size)
    cache = PagedCache(fmt, 1, heads[1], 140, block_size=64)
    out = _run_schedule(cache, sequence, [70, 1, 1, 68], params)
    torch.testing.assert_close(out, attend_by_the_rule(sequence, fmt, params), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_half_precision_models(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fmt = Format.create(name, 64)
    params = AttentionParams(scale=0.125)
    sequence = random_sequence(300, 4, 2, 64, dtype)
    cache = PagedCache(fmt, 1, 2, 300, block_size=fmt.unit_size, dtype=dtype)
    out = _run_schedule(cache, sequence, [130, 1, 169], params)
    # The arithmetic is fp32; what is left is rounding the output to its dtype.
    expected = attend_by_the_rule(sequence, fmt, params).to(dtype)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_batches_equal_the_rule_and_seal_the_same_bytes(data: st.DataObject) -> None:
    """Several requests advance by random amounts; drafts are sometimes rejected."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**16)))
    unit_size = draw(st.sampled_from([64, 128]))
    fmt = Format.create(draw(st.sampled_from(list(SCHEMES))), 32, unit_size, 32)
    window = draw(st.sampled_from([None, 1, 50, 64, 200]))
    params = AttentionParams(scale=0.2, sliding_window=window)
    drafts = draw(st.integers(0, 5))
    lengths = [draw(st.integers(1, 400)) for _ in range(draw(st.integers(1, 3)))]
    sequences = [random_sequence(n, 4, 2, 32) for n in lengths]
    cache = PagedCache(
        fmt,
        len(sequences),
        2,
        400,
        block_size=unit_size * draw(st.sampled_from([1, 2])),
        ring_block_size=draw(st.sampled_from([8, 32])),
        num_speculative_tokens=drafts,
    )
    expected = [attend_by_the_rule(sequence, fmt, params) for sequence in sequences]
    while any(s.computed < n for s, n in zip(sequences, lengths, strict=True)):
        active = [s.computed < n for s, n in zip(sequences, lengths, strict=True)]
        chunks = [
            min(draw(st.one_of(st.integers(1, 1 + drafts), st.integers(1, 400))), n - s.computed)
            if live
            else 0
            for s, n, live in zip(sequences, lengths, active, strict=True)
        ]
        starts = [s.computed for s in sequences]
        # Of a speculative step, only some tokens are confirmed, the others computed again
        # with other contents.
        confirmed = [draw(st.integers(1, c)) if 1 < c <= 1 + drafts else c for c in chunks]
        truths = []
        for sequence, start, chunk, kept in zip(sequences, starts, chunks, confirmed, strict=True):
            truths.append((sequence.key.clone(), sequence.value.clone()))
            sequence.key[start + kept : start + chunk].normal_(0, 30)
            sequence.value[start + kept : start + chunk].normal_(0, 30)
        outs = cache.step(sequences, chunks, params)
        for i, sequence in enumerate(sequences):
            sequence.key, sequence.value = truths[i]
            sequence.computed = starts[i] + confirmed[i]
            torch.testing.assert_close(
                outs[i][: confirmed[i]], expected[i][starts[i] : sequence.computed], **TOLERANCE
            )
    for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        once = PagedCache(fmt, 1, 2, 400, block_size=unit_size)
        sequence.computed = 0
        once.step([sequence], [length], params)
        units = length // unit_size
        assert torch.equal(cache.sealed_records(i, units), once.sealed_records(0, units))


def test_padding_requests_and_rows_are_left_alone() -> None:
    """A batch padded with empty requests and rows, as CUDA graphs need."""
    from kvq_kernels import Batch, reference

    torch.manual_seed(0)
    fmt = Format.create("kvq-int4", 64, unit_size=64)
    cache = PagedCache(fmt, 2, 1, 128, block_size=64)
    sequence = random_sequence(8, 2, 1, 64)
    batch = Batch(torch.tensor([0, 5, 5]), torch.tensor([5, 0]))
    out = torch.full_like(sequence.query, 7)
    reference.seal(sequence.key, sequence.value, cache.cache, batch)
    reference.write_ring(sequence.key, sequence.value, cache.cache, batch)
    reference.decode(sequence.query, cache.cache, batch, AttentionParams(0.1), out)
    assert out[:5].isfinite().all()
    assert (out[5:] == 7).all()
    assert cache.cache.pages.eq(0xFF).all()


def test_non_finite_keys_stay_within_their_request_and_heal_when_sealed() -> None:
    torch.manual_seed(0)
    fmt = Format.create("kvq-int4", 64, unit_size=64)
    params = AttentionParams(scale=0.125)
    good, bad = random_sequence(200, 2, 1, 64), random_sequence(200, 2, 1, 64)
    bad.key[30, 0, 5] = torch.nan
    bad.value[31, 0, 6] = torch.inf
    cache = PagedCache(fmt, 2, 1, 200, block_size=64)
    good_out, bad_out = cache.step([good, bad], [200, 200], params)
    torch.testing.assert_close(good_out, attend_by_the_rule(good, fmt, params), **TOLERANCE)
    # As in vLLM's 16-bit cache, later queries of the request see it while it is unquantised ...
    assert bad_out[30:64].isnan().any()
    # ... and no longer once its unit is sealed.
    assert bad_out[64:].isfinite().all()
