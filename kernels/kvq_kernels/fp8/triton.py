"""Triton kernels of the fp8 formats, with the signatures of :mod:`.reference`.

Attention is one kernel for any number of new tokens. A program takes a block of a request's
queries, times the query heads of one kv head, and one split of their keys; it finds its request
by binary search, so that no length is needed on the host and grids depend on shapes alone, as
CUDA graphs want. Where keys are split, a second kernel combines.

Codes become fp16. Where the hardware has the conversion (sm_89 and later) Triton's own is used;
elsewhere, and in Triton's interpreter, whose own is wrong, the bits are moved: those of E5M2 are
the upper half of an fp16 number, those of E4M3 one that is 256 times too small. That factor and
the scales are folded into the logits and the output.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from kvq_kernels.fp8.formats import Fp8Cache
from kvq_kernels.interface import AttentionParams, Batch
from kvq_kernels.triton import tuning
from kvq_kernels.triton.common import LOG2_E, is_interpreted

MAX_DECODE_TOKENS = 16
"""New tokens per request that :func:`decode` accepts."""

_PROGRAMS_WANTED = 512  # a few waves of the largest GPUs; more splits bring nothing
_MAX_SPLITS = 32
_WRITE_ROWS = 8


# --- codes -----------------------------------------------------------------------------------


@triton.jit
def to_codes(x, E4M3: tl.constexpr):
    """Return the codes, as int32, of fp32 `x`: to nearest even, saturating, NaN to 0."""
    MANTISSA: tl.constexpr = 3 if E4M3 else 2
    BIAS: tl.constexpr = 7 if E4M3 else 15
    LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
    SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if E4M3 else 2.0**-14
    # Adding it leaves the rounded multiple of the smallest code in the low mantissa bits.
    SUBNORMAL: tl.constexpr = 2.0**14 if E4M3 else 2.0**7
    SUBNORMAL_BITS: tl.constexpr = 0x46800000 if E4M3 else 0x43000000
    SHIFT: tl.constexpr = 23 - MANTISSA
    x = tl.where(x == x, x, 0.0)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal = rounded - ((127 - BIAS) << MANTISSA)
    subnormal = (magnitude + SUBNORMAL).to(tl.int32, bitcast=True) - SUBNORMAL_BITS
    return sign | tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def to_fp16(codes, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Return uint8 `codes` as fp16; E4M3 without NATIVE as 1/256 of its value."""
    if NATIVE:
        if E4M3:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            return codes.to(tl.float8e5, bitcast=True).to(tl.float16)
    else:
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7) if E4M3 else wide << 8
        return bits.to(tl.float16, bitcast=True)


@triton.jit
def request_of_row(starts, num_requests, row, STEPS: tl.constexpr):
    """Return the last request that starts at `row` or before: the one `row` belongs to."""
    low = row * 0
    high = low + num_requests - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        before = tl.load(starts + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit
def request_of_block(starts, num_requests, block, STEPS: tl.constexpr, QUERIES: tl.constexpr):
    """Return the request of a block of queries, and the block's first new token in it.

    Request i owns the blocks from ``(starts[i] - starts[0]) // QUERIES + i`` on, which are enough
    for its new tokens; what is beyond those is nobody's.
    """
    origin = tl.load(starts)
    low = block * 0
    high = low + num_requests - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        before = (tl.load(starts + middle) - origin) // QUERIES + middle <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    own = (tl.load(starts + low) - origin) // QUERIES + low
    return low, (block - own) * QUERIES


# --- writing ---------------------------------------------------------------------------------


@triton.jit
def _write(
    key,
    value,
    pages,
    block_table,
    key_scale,
    value_scale,
    starts,
    lens,
    num_requests,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    pages_block_stride,
    table_stride,
    STEPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    E4M3: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    real = (rows >= tl.load(starts)) & (rows < tl.load(starts + num_requests))
    request = request_of_row(starts, num_requests, rows, STEPS)
    stop = tl.load(starts + request + 1)
    length = tl.load(lens + request)
    real &= length > 0  # or else a dummy request
    position = length - (stop - rows)
    position = tl.where(real, position, 0)
    block = tl.load(block_table + request * table_stride + position // BLOCK_SIZE, mask=real)
    channel = tl.arange(0, PADDED)
    mask = real[:, None] & (channel < HEAD_SIZE)[None]
    slot = head * BLOCK_SIZE + position % BLOCK_SIZE
    to = pages + block.to(tl.int64) * pages_block_stride + slot * (2 * HEAD_SIZE)
    wide = rows.to(tl.int64)[:, None]
    k = tl.load(
        key + wide * key_row_stride + head * key_head_stride + channel[None], mask=mask, other=0.0
    )
    v = tl.load(
        value + wide * value_row_stride + head * value_head_stride + channel[None],
        mask=mask,
        other=0.0,
    )
    k_codes = to_codes(tl.div_rn(k.to(tl.float32), tl.load(key_scale + head)), E4M3)
    v_codes = to_codes(tl.div_rn(v.to(tl.float32), tl.load(value_scale + head)), E4M3)
    tl.store(to[:, None] + channel[None], k_codes.to(tl.uint8), mask=mask)
    tl.store(to[:, None] + HEAD_SIZE + channel[None], v_codes.to(tl.uint8), mask=mask)


def write(key: torch.Tensor, value: torch.Tensor, cache: Fp8Cache, batch: Batch) -> None:
    """Quantise this step's tokens into the pages, as :func:`.reference.write`, to the bit.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache; its pages are written.
        batch: which tokens belong to which request.

    """
    fmt = cache.fmt
    num_requests = batch.seq_lens.shape[0]
    _write[(triton.cdiv(key.shape[0], _WRITE_ROWS), key.shape[1])](
        key,
        value,
        cache.pages,
        cache.block_table,
        cache.key_scale,
        cache.value_scale,
        batch.query_start_loc,
        batch.seq_lens,
        num_requests,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.pages.stride(0),
        cache.block_table.stride(0),
        STEPS=num_requests.bit_length(),
        BLOCK_SIZE=cache.pages.shape[2],
        HEAD_SIZE=fmt.head_size,
        PADDED=triton.next_power_of_2(fmt.head_size),
        ROWS=_WRITE_ROWS,
        E4M3=_is_e4m3(cache),
        num_warps=4,
    )


# --- attention -------------------------------------------------------------------------------


@triton.jit
def _attend(
    query,
    pages,
    block_table,
    key_scale,
    value_scale,
    starts,
    lens,
    num_requests,
    sinks,
    slopes,
    out,
    partial,
    partial_stats,
    scale,
    soft_cap,
    window,
    query_row_stride,
    query_head_stride,
    out_row_stride,
    out_head_stride,
    pages_block_stride,
    table_stride,
    STEPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    QUERIES: tl.constexpr,  # of a block
    ROWS: tl.constexpr,  # at least QUERIES * GROUP
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    query_block = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    request, first = request_of_block(starts, num_requests, query_block, STEPS, QUERIES)
    start = tl.load(starts + request).to(tl.int32)
    count = tl.load(starts + request + 1).to(tl.int32) - start
    length = tl.load(lens + request).to(tl.int32)
    if (first >= count) | (length == 0):
        return

    r = tl.arange(0, ROWS)
    token = first + r // GROUP
    query_head = head * GROUP + r % GROUP
    real = (r < QUERIES * GROUP) & (token < count)
    position = length - count + token
    channel = tl.arange(0, PADDED)
    row = (start + token).to(tl.int64)
    q_mask = real[:, None] & (channel < HEAD_SIZE)[None]
    q = tl.load(
        query
        + row[:, None] * query_row_stride
        + query_head[:, None] * query_head_stride
        + channel[None],
        mask=q_mask,
        other=0.0,
    ).to(DOT_DTYPE)
    READ_FACTOR: tl.constexpr = 256.0 if E4M3 and not NATIVE else 1.0
    logit_scale = scale * tl.load(key_scale + head) * READ_FACTOR
    if ALIBI:
        slope = tl.load(slopes + query_head, mask=real, other=0.0)

    low = 0
    if WINDOW:
        low = tl.maximum(length - count + first - window + 1, 0)
    high = length - count + tl.minimum(first + QUERIES, count)  # behind the last visible key
    if SPLITS > 1:
        per_split = tl.cdiv(tl.cdiv(high - low, TILE), SPLITS) * TILE
        low += split * per_split
        high = tl.minimum(high, low + per_split)

    most = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for tile in tl.range(low, high, TILE):
        key_position = tile + tl.arange(0, TILE)
        valid = key_position < high
        block = tl.load(
            block_table + request * table_stride + key_position // BLOCK_SIZE, mask=valid, other=0
        )
        slot = head * BLOCK_SIZE + key_position % BLOCK_SIZE
        tokens = pages + block.to(tl.int64) * pages_block_stride + slot * (2 * HEAD_SIZE)
        mask = valid[:, None] & (channel < HEAD_SIZE)[None]
        # Masked codes are 0: what lies in blocks of others may be NaN.
        k = to_fp16(tl.load(tokens[:, None] + channel[None], mask=mask, other=0), E4M3, NATIVE)
        v = tl.load(tokens[:, None] + HEAD_SIZE + channel[None], mask=mask, other=0)
        logits = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * logit_scale
        if SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            logits = soft_cap - 2.0 * soft_cap / (tl.exp(2.0 * logits / soft_cap) + 1.0)
        distance = key_position[None] - position[:, None]
        if ALIBI:
            logits += slope[:, None] * distance
        visible = valid[None] & (distance <= 0)
        if WINDOW:
            visible &= distance > -window
        logits = tl.where(visible, logits * LOG2_E, float("-inf"))
        new_most = tl.maximum(most, tl.max(logits, 1))
        weights = tl.exp2(logits - new_most[:, None])
        rescale = tl.exp2(most - new_most)
        total = total * rescale + tl.sum(weights, 1)
        v = to_fp16(v, E4M3, NATIVE).to(DOT_DTYPE)
        acc = acc * rescale[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        most = new_most

    if SPLITS > 1:
        place = (query_block.to(tl.int64) * tl.num_programs(1) + head) * SPLITS + split
        rows = place * ROWS + r
        tl.store(partial + rows[:, None] * PADDED + channel[None], acc)
        tl.store(partial_stats + rows * 2, most)
        tl.store(partial_stats + rows * 2 + 1, total)
    else:
        if SINKS:
            sink = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            new_most = tl.maximum(most, sink)
            rescale = tl.exp2(most - new_most)
            total = total * rescale + tl.exp2(sink - new_most)
            acc *= rescale[:, None]
        factor = tl.load(value_scale + head) * READ_FACTOR
        result = acc * (factor / total)[:, None]
        to = out + row[:, None] * out_row_stride + query_head[:, None] * out_head_stride
        tl.store(to + channel[None], result.to(out.dtype.element_ty), mask=q_mask)


@triton.jit
def _combine(
    partial,
    partial_stats,
    value_scale,
    starts,
    lens,
    num_requests,
    sinks,
    out,
    out_row_stride,
    out_head_stride,
    STEPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    READ_FACTOR: tl.constexpr,
):
    query_block = tl.program_id(0)
    head = tl.program_id(1)
    r = tl.program_id(2)  # row of the block
    request, first = request_of_block(starts, num_requests, query_block, STEPS, QUERIES)
    start = tl.load(starts + request).to(tl.int32)
    count = tl.load(starts + request + 1).to(tl.int32) - start
    token = first + r // GROUP
    if (token >= count) | (tl.load(lens + request) == 0):
        return
    query_head = head * GROUP + r % GROUP
    place = (query_block.to(tl.int64) * tl.num_programs(1) + head) * SPLITS
    rows = (place + tl.arange(0, SPLITS)) * ROWS + r
    channel = tl.arange(0, PADDED)
    most = tl.load(partial_stats + rows * 2)
    total = tl.load(partial_stats + rows * 2 + 1)
    acc = tl.load(partial + rows[:, None] * PADDED + channel[None])
    highest = tl.max(most, 0)
    if SINKS:
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(most - highest)
    total = tl.sum(total * weights, 0)
    if SINKS:
        total += tl.exp2(sink - highest)
    factor = tl.load(value_scale + head) * READ_FACTOR
    result = tl.sum(acc * weights[:, None], 0) * (factor / total)
    row = (start + token).to(tl.int64)
    to = out + row * out_row_stride + query_head * out_head_stride + channel
    tl.store(to, result.to(out.dtype.element_ty), mask=channel < HEAD_SIZE)


def decode(
    query: torch.Tensor,
    cache: Fp8Cache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests with up to :data:`MAX_DECODE_TOKENS` new tokens, their keys split.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        cache: the layer's cache, after :func:`write`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`.

    """
    num_requests, num_kv_heads = batch.seq_lens.shape[0], cache.pages.shape[1]
    max_rows = min(query.shape[0], num_requests * MAX_DECODE_TOKENS)
    tokens = cache.block_table.shape[1] * cache.pages.shape[2]
    splits = min(
        triton.next_power_of_2(max(1, _PROGRAMS_WANTED // (num_requests * num_kv_heads))),
        triton.next_power_of_2(triton.cdiv(tokens, 256)),
        _MAX_SPLITS,
    )
    _launch(query, cache, batch, params, out, max_rows, min_rows=16, splits=splits)


def prefill(
    query: torch.Tensor,
    cache: Fp8Cache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests with any number of new tokens.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        cache: the layer's cache, after :func:`write`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`.

    """
    _launch(query, cache, batch, params, out, query.shape[0], min_rows=64, splits=1)


def _launch(
    query: torch.Tensor,
    cache: Fp8Cache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
    max_rows: int,
    min_rows: int,
    splits: int,
) -> None:
    """Run the attention kernel, and where keys are split the one that combines."""
    fmt, device = cache.fmt, query.device
    num_requests, num_kv_heads = batch.seq_lens.shape[0], cache.pages.shape[1]
    group = query.shape[1] // num_kv_heads
    rows = max(min_rows, triton.next_power_of_2(group))
    queries = rows // group
    num_blocks = max_rows // queries + num_requests
    padded = triton.next_power_of_2(fmt.head_size)
    partial = partial_stats = out
    if splits > 1:
        places = num_blocks * num_kv_heads * splits * rows
        partial = torch.empty(places, padded, dtype=torch.float32, device=device)
        partial_stats = torch.empty(places, 2, dtype=torch.float32, device=device)
    sinks = out if params.sinks is None else params.sinks
    slopes = out if params.alibi_slopes is None else params.alibi_slopes
    shape = {
        "STEPS": num_requests.bit_length(),
        "HEAD_SIZE": fmt.head_size,
        "PADDED": padded,
        "GROUP": group,
        "QUERIES": queries,
        "ROWS": rows,
        "SPLITS": splits,
        "SINKS": params.sinks is not None,
    }
    native = _has_native_fp8(device)
    exact = is_interpreted() or query.dtype == torch.float32
    _attend[(num_blocks, num_kv_heads, splits)](
        query,
        cache.pages,
        cache.block_table,
        cache.key_scale,
        cache.value_scale,
        batch.query_start_loc,
        batch.seq_lens,
        num_requests,
        sinks,
        slopes,
        out,
        partial,
        partial_stats,
        params.scale,
        params.soft_cap or 0.0,
        params.sliding_window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        cache.pages.stride(0),
        cache.block_table.stride(0),
        BLOCK_SIZE=cache.pages.shape[2],
        TILE=_tile(padded, rows, device),
        SOFT_CAP=bool(params.soft_cap),
        WINDOW=params.sliding_window is not None,
        ALIBI=params.alibi_slopes is not None,
        E4M3=_is_e4m3(cache),
        NATIVE=native,
        # fp16 holds every code; queries of bf16 models fit it by far.
        DOT_DTYPE=tl.float32 if exact else tl.float16,
        **shape,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _combine[(num_blocks, num_kv_heads, queries * group)](
            partial,
            partial_stats,
            cache.value_scale,
            batch.query_start_loc,
            batch.seq_lens,
            num_requests,
            sinks,
            out,
            out.stride(0),
            out.stride(1),
            READ_FACTOR=256.0 if _is_e4m3(cache) and not native else 1.0,
            **shape,
            num_warps=2,
        )


def _tile(padded: int, rows: int, device: torch.device) -> int:
    """Return the tokens per iteration, as many as leave no register spilled."""
    # Before sm_90, operands of matrix products lie in registers.
    crowded = rows >= 64 and tuning.device_info(device).arch in ("sm_80", "sm_86", "sm_89")
    return 32 if crowded or padded > 128 else 64


def _is_e4m3(cache: Fp8Cache) -> bool:
    return cache.fmt.dtype == torch.float8_e4m3fn


def _has_native_fp8(device: torch.device) -> bool:
    """Whether Triton's own conversion from fp8 is exact and fast there."""
    info = tuning.device_info(device)
    return info.is_nvidia and int(info.arch.removeprefix("sm_")) >= 89
