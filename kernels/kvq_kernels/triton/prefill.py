"""Prefill attention over sealed units, the open unit and the step's own tokens.

One program computes a tile of query tokens of some query heads that share a kv head. Tiles are cut
by absolute position so that one lies within a unit. By the rule all its queries then read the same:
everything before the unit from sealed units, and the rest, at most one unit, at full precision.
So a program is flash attention in two loops with one running softmax:

1. over sealed tokens, dequantised in registers to fp16. No causal mask: all of them come first.
   With rotated values the sum is in rotated space; it is rotated back once, after this loop. That
   is linear, so it does not matter that the sum is not normalised yet, and it costs as much as one
   more iteration, where rotating new values instead would cost it per tile of them and still leave
   the output to rotate.
2. over the open unit, in the model's dtype: from the ring, and from the step's keys and values.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from kvq_kernels.interface import AttentionParams, Batch, LayerCache
from kvq_kernels.triton import tuning
from kvq_kernels.triton.blocks import (
    FP16_MAX,
    find_tile,
    limit,
    load_tokens,
    multiply_by_signs,
    num_tiles,
    rotation,
    rotation_pieces,
)
from kvq_kernels.triton.common import (
    CUT_STEPS,
    CUT_TOKENS,
    LOG2_E,
    LOWEST,
    bytes_to_fp16,
    dot_dtype,
    meta_scale,
    meta_zero,
    nibbles_to_fp16,
)

# --- sealed tokens ---------------------------------------------------------------------------


@triton.jit
def _scale_and_limit(codes, scale, zero, DTYPE: tl.constexpr):
    """Return ``code * scale + zero``; all are of `DTYPE`.

    Rounding of the scale can bring the largest code of an extreme range beyond fp16's largest
    number, where infinity would make the whole output NaN.
    """
    x = codes * scale + zero
    return tl.minimum(x, FP16_MAX) if tl.float16 == DTYPE else x


@triton.jit
def _dequantise_bytes(codes, meta, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    """Dequantise 8-bit `codes`; `meta`, int32 words, broadcasts against them."""
    codes = bytes_to_fp16(codes, USE_ASM) - 1024.0 if tl.float16 == DTYPE else codes.to(DTYPE)
    return _scale_and_limit(codes, meta_scale(meta).to(DTYPE), meta_zero(meta).to(DTYPE), DTYPE)


@triton.jit
def _dequantise_nibbles(codes, low_meta, high_meta, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    """Dequantise 4-bit `codes`, low and high nibbles in turns.

    Each meta is (scale, zero) of `DTYPE` and broadcasts against the codes. ``[m, 2 * n]`` for
    codes ``[m, n]``.
    """
    if tl.float16 == DTYPE:
        low, byte = nibbles_to_fp16(codes, USE_ASM)
        high = (byte - low) * 0.0625
        low -= 1024.0
    else:
        low = (codes & 15).to(DTYPE)
        high = (codes >> 4).to(DTYPE)
    return tl.interleave(
        _scale_and_limit(low, low_meta[0], low_meta[1], DTYPE),
        _scale_and_limit(high, high_meta[0], high_meta[1], DTYPE),
    )


@triton.jit
def _once_per_program(x, USE_ASM: tl.constexpr):
    """Return fp16 `x`, dequantised by one warp only, and passed to the others in shared memory.

    Where matrix products take this operand from registers, Triton would otherwise move the
    dequantisation behind the exchange between warps, and every warp would do all of it. It does
    not move what is between two instructions of unknown effect.
    """
    if USE_ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2
        )
    else:
        return x


@triton.jit
def _load_key_meta(
    blob,
    column,
    half,
    FMT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    EXCHANGE: tl.constexpr,
):
    """Load scale and zero of half of the channels of 4-bit keys, for a tile from `column` on.

    `DTYPE` ``[TILE, BLOCK_W]`` each, tokens in the order of :func:`_tokens`: its two runs come in
    turns, and within a run they are the same. With `EXCHANGE` they are made once per program.
    """
    WIDTH: tl.constexpr = FMT.head_size // 2
    columns = tl.arange(0, BLOCK_W)
    meta = (blob + FMT.key_meta_offset).to(tl.pointer_type(tl.int32)) + half * WIDTH
    words = tl.load(meta + columns, mask=columns < WIDTH, other=0)[None, :]
    scale, zero = meta_scale(words).to(tl.float32), meta_zero(words).to(tl.float32)

    # Four cuts a load: Triton does not load ahead what is less than 32 bits wide.
    RUN_CUTS: tl.constexpr = FMT.key_group_size // 2 // CUT_TOKENS * FMT.head_size
    cuts = blob + FMT.key_cuts_offset + half * WIDTH + column // CUT_TOKENS * FMT.head_size
    runs = tl.arange(0, 2)[:, None] * (RUN_CUTS // 4)
    fours = tl.arange(0, BLOCK_W // 4)[None, :]
    cuts = tl.load(
        cuts.to(tl.pointer_type(tl.int32)) + (runs + fours), mask=fours < WIDTH // 4, other=0
    )
    cuts = (cuts[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]).reshape([2, BLOCK_W])
    low, high = (cuts & 15).to(tl.float32), (cuts >> 4 & 15).to(tl.float32)
    zero = (zero + scale * (low * (15 / CUT_STEPS))).to(DTYPE)
    scale = (scale * (1.0 - (low + high) * (1 / CUT_STEPS))).to(DTYPE)
    return _in_turns(scale, TILE, EXCHANGE), _in_turns(zero, TILE, EXCHANGE)


@triton.jit
def _in_turns(x, TILE: tl.constexpr, EXCHANGE: tl.constexpr):
    """Return row 0 and row 1 of ``x[2, n]`` in turns, ``[TILE, n]``."""
    if x.dtype == tl.float16:
        x = _once_per_program(x, EXCHANGE)
    return tl.broadcast_to(x[None, :, :], [TILE // 2, 2, x.shape[1]]).reshape([TILE, x.shape[1]])


@triton.jit
def _load_sealed_keys(
    blob,
    column,
    tokens,
    FMT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Load the keys of a blob's `tokens`, ``[TILE, BLOCK_D]``, 0 beyond the head size.

    At 4 bits, a byte holds channels c and c + D / 2; they come in turns.
    """
    WIDTH: tl.constexpr = FMT.head_size * FMT.key_bits // 8
    BLOCK_W: tl.constexpr = BLOCK_D * FMT.key_bits // 8
    columns = tl.arange(0, BLOCK_W)
    inside = columns < WIDTH
    codes = tl.load(
        blob + FMT.key_codes_offset + tokens[:, None] * WIDTH + columns[None, :],
        mask=inside[None, :],
        other=0,
    )
    if FMT.key_bits == 8:
        meta = (blob + FMT.key_meta_offset).to(tl.pointer_type(tl.int32)) + columns
        words = tl.load(meta, mask=inside, other=0)[None, :]
        return _dequantise_bytes(codes, words, DTYPE, ASM)
    else:
        # Where one warp dequantises for all, it need not be told its scales by others.
        EXCHANGE: tl.constexpr = ASM and not SHARE
        low_meta = _load_key_meta(blob, column, 0, FMT, BLOCK_W, TILE, DTYPE, EXCHANGE)
        high_meta = _load_key_meta(blob, column, 1, FMT, BLOCK_W, TILE, DTYPE, EXCHANGE)
        return _dequantise_nibbles(codes, low_meta, high_meta, DTYPE, ASM)


@triton.jit
def _load_sealed_values(
    blob,
    column,
    FMT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load the values of `TILE` tokens of a blob, from byte `column` of each channel's codes.

    ``[BLOCK_D, TILE]``, tokens in the order of :func:`_tokens`, 0 beyond the head size.
    """
    WIDTH: tl.constexpr = FMT.key_group_size * FMT.value_bits // 8
    channels = tl.arange(0, BLOCK_D)[:, None]
    columns = column + tl.arange(0, TILE * FMT.value_bits // 8)
    meta = (blob + FMT.value_meta_offset).to(tl.pointer_type(tl.int32)) + columns
    codes = tl.load(
        blob + FMT.value_codes_offset + channels * WIDTH + columns[None, :],
        mask=channels < FMT.head_size,
        other=0,
    )
    words = tl.load(meta)[None, :]
    if FMT.value_bits == 8:
        return _dequantise_bytes(codes, words, DTYPE, ASM)
    else:
        high_words = tl.load(meta + WIDTH)[None, :]
        low_meta = (meta_scale(words).to(DTYPE), meta_zero(words).to(DTYPE))
        high_meta = (meta_scale(high_words).to(DTYPE), meta_zero(high_words).to(DTYPE))
        return _dequantise_nibbles(codes, low_meta, high_meta, DTYPE, ASM)


@triton.jit
def _tokens(column, FMT: tl.constexpr, TILE: tl.constexpr):
    """Return which tokens of a blob have their value codes in bytes `column` and on.

    At 4 bits a byte holds tokens t and t + g / 2; they come in turns.
    """
    i = tl.arange(0, TILE)
    if FMT.value_bits == 8:
        return column + i
    else:
        return column + i // 2 + i % 2 * (FMT.key_group_size // 2)


@triton.jit
def _load_query(query, rows, valid, FMT: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    """Load query rows, limited to fp16, channels in the order of :func:`_load_sealed_keys`."""
    HALVES: tl.constexpr = 8 // FMT.key_bits
    WIDTH: tl.constexpr = FMT.head_size // HALVES
    columns = tl.arange(0, BLOCK_D // HALVES)[None, :]
    mask = valid[:, None] & (columns < WIDTH)
    q = tl.load(query + rows[:, None] + columns, mask=mask, other=0.0)
    if HALVES == 2:
        q = tl.interleave(q, tl.load(query + rows[:, None] + WIDTH + columns, mask=mask, other=0.0))
    return limit(q.to(tl.float32)).to(DTYPE)


@triton.jit
def _unknown(number: tl.constexpr, USE_ASM: tl.constexpr):
    """Return int32 `number`, of which the compiler does not know what it is.

    With 0 added, offsets of rows behind a loop are computed anew. Otherwise those from before the
    loop would be kept, in a register for each row of a thread, where the loop has too few.
    """
    if USE_ASM:
        return tl.inline_asm_elementwise(
            f"mov.b32 $0, {number};", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return number


# --- softmax ---------------------------------------------------------------------------------


@triton.jit
def _scores(
    products,
    factor,
    soft_cap,
    slopes,
    distances,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the logits of query-key products, without the causal mask, and their unit.

    A score times the unit is a logit in units of log 2. `distances` are query minus key positions.
    `factor` is the scale times log2(e), or with a soft cap the scale over the cap; `soft_cap` and
    `slopes` are times log2(e).
    """
    unit = factor
    if SOFT_CAP:  # tanh x = 1 - 2 / (1 + exp(2 x)), also where exp overflows
        exp_2x = tl.exp2(products * (factor * (2.0 * LOG2_E)))
        products = soft_cap * (1.0 - 2.0 / (1.0 + exp_2x))
        unit = 1.0
    if ALIBI:
        products = products * unit - slopes[:, None] * distances.to(tl.float32)
        unit = 1.0
    if WINDOW > 0:
        products = tl.where(distances < WINDOW, products, float("-inf"))
    return products, unit


@triton.jit
def _accumulate(scores, unit, values, top, total, acc, DTYPE: tl.constexpr):
    """Take one tile of scores ``[rows, n]`` and values ``[n, BLOCK_D]`` into the softmax."""
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    weights = tl.exp2(scores * unit - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(DTYPE), values, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _rotate_back(
    x,
    signs,
    sizes,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Multiply fp32 ``[n, >= D]`` by `D` rows and columns of the matrix, from `signs`, `sizes` on.

    At most `WIDTH` at a time: a warp may need the whole matrix in its registers.
    """
    BLOCK: tl.constexpr = x.shape[1]
    if BLOCK <= WIDTH:
        i = tl.arange(0, BLOCK)[:, None]
        j = tl.arange(0, BLOCK)[None, :]
        matrix = tl.load(signs + i * STRIDE + j, mask=(i < D) & (j < D), other=0.0)
        x = multiply_by_signs(x, matrix, tl.zeros(x.shape, tl.float32), PIECES)
        return x * tl.load(sizes + j, mask=j < D, other=0.0)
    else:
        HALF: tl.constexpr = BLOCK // 2
        low, high = x.reshape([x.shape[0], 2, HALF]).permute(0, 2, 1).split()
        if D == BLOCK:  # a step of the recursion that defines Sylvester's matrix
            low, high = low + high, low - high
            low = _rotate_back(low, signs, sizes, HALF, STRIDE, PIECES, WIDTH)
            high = _rotate_back(high, signs, sizes, HALF, STRIDE, PIECES, WIDTH)
        elif D > HALF:  # the matrix is block-diagonal
            low = _rotate_back(low, signs, sizes, HALF, STRIDE, PIECES, WIDTH)
            signs += HALF * STRIDE + HALF
            high = _rotate_back(high, signs, sizes + HALF, D - HALF, STRIDE, PIECES, WIDTH)
        else:
            low = _rotate_back(low, signs, sizes, D, STRIDE, PIECES, WIDTH)
        return tl.join(low, high).permute(0, 2, 1).reshape([x.shape[0], BLOCK])


# --- the kernel ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_requests"])
def _prefill_kernel(
    query,
    key,
    value,
    pages,
    block_table,
    ring,
    ring_table,
    query_start_loc,
    seq_lens,
    signs,
    sizes,
    sinks,
    alibi_slopes,
    out,
    num_requests,
    factor,
    soft_cap,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    pages_stride_block,
    block_table_stride,
    ring_stride_block,
    ring_stride_head,
    ring_stride_token,
    ring_table_stride,
    out_stride_token,
    out_stride_head,
    FMT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    GQA: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    SEALED_TILE: tl.constexpr,
    OPEN_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    SEALED_DTYPE: tl.constexpr,
    PIECES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    USE_ASM: tl.constexpr,
    SHARE: tl.constexpr,
    ROTATION_WIDTH: tl.constexpr,
):
    """Attend of `TOKENS` query tokens of `HEADS` heads.

    Grid: ``[num_tiles(num_tokens, num_requests, TOKENS, 2), num_heads / HEADS]``. A request of n
    new tokens touches up to n // TOKENS + 2 tiles. The last tiles, which have most to read, come
    first.
    """
    U: tl.constexpr = FMT.unit_size
    G: tl.constexpr = FMT.key_group_size
    D: tl.constexpr = FMT.head_size
    request, number, row, start, end = find_tile(
        query_start_loc,
        seq_lens,
        num_requests,
        tl.num_programs(0) - 1 - tl.program_id(0),
        TOKENS,
        SPARE=2,
    )
    tile_start = (start // TOKENS + number) * TOKENS
    first_query = tl.maximum(start, tile_start)
    end_query = tl.minimum(end, tile_start + TOKENS)
    if first_query >= end_query:
        return
    unit_start = tile_start // U * U
    lowest = 0  # position that any of the queries sees
    if WINDOW > 0:
        lowest = tl.maximum(0, first_query - WINDOW + 1)

    # Offsets within the tile fit 32 bits and cost few registers, unlike one pointer per row.
    rows = tl.arange(0, TOKENS * HEADS)
    positions = tile_start + rows // HEADS
    valid = (positions >= start) & (positions < end)
    first_head = tl.program_id(1) * HEADS
    heads = first_head + rows % HEADS
    kv_head = first_head // GQA
    tile_row = (row + tile_start - start).to(tl.int64)
    query += tile_row * query_stride_token + first_head * query_stride_head
    query_rows = rows // HEADS * query_stride_token + rows % HEADS * query_stride_head
    out += tile_row * out_stride_token + first_head * out_stride_head
    block_table += request.to(tl.int64) * block_table_stride
    pages += kv_head * UNITS_PER_BLOCK * FMT.record_bytes
    slopes = tl.zeros([TOKENS * HEADS], tl.float32)
    if ALIBI:
        slopes = tl.load(alibi_slopes + heads) * LOG2_E
    top = tl.full([TOKENS * HEADS], LOWEST, tl.float32)
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    acc = tl.zeros([TOKENS * HEADS, BLOCK_D], tl.float32)

    channels = tl.arange(0, BLOCK_D)
    inside = channels < D
    q_mask = valid[:, None] & inside[None, :]
    first = lowest // G * G  # units and blobs below the window are not loaded
    if first < unit_start:
        anchor_products = tl.zeros([TOKENS * HEADS], tl.float32)
        if FMT.anchor and first == 0:
            record = pages + tl.load(block_table).to(tl.int64) * pages_stride_block
            codes = tl.load(record + FMT.anchor_codes_offset + channels, mask=inside, other=0)
            word = tl.load((record + FMT.anchor_meta_offset).to(tl.pointer_type(tl.int32)))
            anchor = codes.to(tl.float32) * meta_scale(word) + meta_zero(word)
            q = tl.load(query + query_rows[:, None] + channels[None, :], mask=q_mask, other=0.0)
            anchor_products = tl.sum(q.to(tl.float32) * anchor[None, :], 1)
        q_sealed = _load_query(query, query_rows, valid, FMT, BLOCK_D, SEALED_DTYPE)
        # What an outer loop carries, Triton keeps in shared memory for products on sm_90, where
        # the query would otherwise take half of the registers. The loop is made only once.
        for _ in tl.range(_unknown(1, USE_ASM)):
            for position in tl.range(first, unit_start, SEALED_TILE):
                unit = position // U
                block = tl.load(block_table + unit // UNITS_PER_BLOCK).to(tl.int64)
                blob = (
                    pages
                    + block * pages_stride_block
                    + unit % UNITS_PER_BLOCK * FMT.record_bytes
                    + position % U // G * FMT.blob_bytes
                )
                column = position % G * FMT.value_bits // 8
                tokens = _tokens(column, FMT, SEALED_TILE)
                k = _load_sealed_keys(
                    blob, column, tokens, FMT, BLOCK_D, SEALED_TILE, SEALED_DTYPE, USE_ASM, SHARE
                )
                if SHARE:
                    k = _once_per_program(k, USE_ASM)
                products = tl.dot(q_sealed, tl.trans(k), input_precision="ieee")
                if FMT.anchor:
                    is_anchor = (position + tl.arange(0, SEALED_TILE) == 0)[None, :]
                    products = tl.where(is_anchor, anchor_products[:, None], products)
                distances = positions[:, None] - (position // G * G + tokens)[None, :]
                scores, score_unit = _scores(
                    products, factor, soft_cap, slopes, distances, SOFT_CAP, ALIBI, WINDOW
                )
                v = _load_sealed_values(
                    blob, column, FMT, BLOCK_D, SEALED_TILE, SEALED_DTYPE, USE_ASM
                )
                if SHARE:
                    v = _once_per_program(v, USE_ASM)
                top, total, acc = _accumulate(
                    scores, score_unit, tl.trans(v), top, total, acc, SEALED_DTYPE
                )
            q_sealed = tl.zeros_like(q_sealed)
        if FMT.rotate_values:
            acc = _rotate_back(acc, signs, sizes, D, D, PIECES, ROTATION_WIDTH)

    rows = tl.arange(0, TOKENS * HEADS) + _unknown(0, USE_ASM)
    positions = tile_start + rows // HEADS
    query_rows = rows // HEADS * query_stride_token + rows % HEADS * query_stride_head
    q_mask = ((positions >= start) & (positions < end))[:, None] & inside[None, :]
    q = tl.load(query + query_rows[:, None] + channels[None, :], mask=q_mask, other=0.0).to(DTYPE)
    ring += kv_head * ring_stride_head
    ring_table += request.to(tl.int64) * ring_table_stride
    key_source = (
        key + row.to(tl.int64) * key_stride_token + kv_head * key_stride_head,
        key_stride_token,
        start,
        ring,
        ring_stride_block,
        ring_stride_token,
        ring_table,
    )
    value_source = (
        value + row.to(tl.int64) * value_stride_token + kv_head * value_stride_head,
        value_stride_token,
        start,
        ring + D,
        ring_stride_block,
        ring_stride_token,
        ring_table,
    )
    first = tl.maximum(unit_start, lowest // OPEN_TILE * OPEN_TILE)
    for position in tl.range(first, end_query, OPEN_TILE):
        keys = position + tl.arange(0, OPEN_TILE)
        there = keys < end_query
        k = load_tokens(key_source, keys, there, channels, inside, RING_CAPACITY, RING_BLOCK)
        products = tl.dot(q, tl.trans(k.to(DTYPE)), input_precision="ieee")
        distances = positions[:, None] - keys[None, :]
        scores, score_unit = _scores(
            products, factor, soft_cap, slopes, distances, SOFT_CAP, ALIBI, WINDOW
        )
        scores = tl.where(distances >= 0, scores, float("-inf"))
        v = load_tokens(value_source, keys, there, channels, inside, RING_CAPACITY, RING_BLOCK)
        top, total, acc = _accumulate(scores, score_unit, v.to(DTYPE), top, total, acc, DTYPE)

    if SINKS:  # one more logit per head, with no value behind it
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.exp2(sink - new_top)
        acc *= decay[:, None]
    result = acc / total[:, None]
    rows = tl.arange(0, TOKENS * HEADS) + _unknown(0, USE_ASM)
    positions = tile_start + rows // HEADS
    out_rows = rows // HEADS * out_stride_token + rows % HEADS * out_stride_head
    q_mask = ((positions >= start) & (positions < end))[:, None] & inside[None, :]
    tl.store(
        out + out_rows[:, None] + channels[None, :],
        result.to(out.dtype.element_ty),
        mask=q_mask,
    )


# --- operation -------------------------------------------------------------------------------


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests with any number of new tokens, as :func:`reference.prefill`: one launch.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``, of the ring's dtype.
        value: as `key`.
        cache: the layer's cache, after :func:`seal` and before :func:`write_ring`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`, any float dtype.

    Raises:
        TypeError: `key` or `value` have another dtype than the ring.

    """
    if not key.dtype == value.dtype == cache.ring.dtype:
        raise TypeError(
            f"A ring of {cache.ring.dtype} does not go with {key.dtype} keys and {value.dtype} "
            "values."
        )
    (num_requests,) = batch.seq_lens.shape
    if num_requests == 0:
        return
    fmt = cache.fmt
    num_tokens, num_heads, head_size = query.shape
    gqa = num_heads // key.shape[1]
    device = tuning.device_info(query.device)
    cut = tuning.prefill_tuning(fmt, device.arch)
    # Heads that share a kv head also share a program, as many as a power of two divides evenly,
    # so that no row is padding; the tokens of a program lie within a unit.
    heads = min(gqa & -gqa, cut.rows)
    tokens = min(cut.rows // heads, fmt.unit_size)
    dtype = dot_dtype(key.dtype)
    grid = (num_tiles(num_tokens, num_requests, tokens, 2), num_heads // heads)
    _prefill_kernel[grid](
        query,
        key,
        value,
        cache.pages,
        cache.block_table,
        cache.ring,
        cache.ring_table,
        batch.query_start_loc,
        batch.seq_lens,
        *rotation(head_size, key.device),
        params.sinks,
        params.alibi_slopes,
        out,
        num_requests,
        params.scale / params.soft_cap if params.soft_cap else params.scale * LOG2_E.value,
        (params.soft_cap or 0.0) * LOG2_E.value,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        cache.pages.stride(0),
        cache.block_table.stride(0),
        *cache.ring.stride()[:3],
        cache.ring_table.stride(0),
        *out.stride()[:2],
        FMT=fmt,
        UNITS_PER_BLOCK=cache.pages.shape[2] // fmt.unit_size,
        RING_CAPACITY=cache.ring_capacity,
        RING_BLOCK=cache.ring.shape[2],
        GQA=gqa,
        BLOCK_D=triton.next_power_of_2(head_size),
        TOKENS=tokens,
        HEADS=heads,
        SEALED_TILE=cut.sealed_tile,
        OPEN_TILE=cut.open_tile,
        DTYPE=dtype,
        SEALED_DTYPE=tl.float32 if dtype == tl.float32 else tl.float16,
        PIECES=rotation_pieces(key.dtype),
        SOFT_CAP=bool(params.soft_cap),
        WINDOW=params.sliding_window or 0,
        ALIBI=params.alibi_slopes is not None,
        SINKS=params.sinks is not None,
        USE_ASM=device.is_nvidia,
        SHARE=cut.share,
        ROTATION_WIDTH=cut.rotation_width,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        enable_fp_fusion=True,  # Triton 3.10 no longer does it unasked
    )
