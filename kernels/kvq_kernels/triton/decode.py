"""Decode attention straight from the packed pages.

Split-KV flash decoding in two launches. :func:`_attend` has one program per request, kv head,
tile of query rows and split; a query row is one query head of one new token. All but one of the
splits walk the sealed units, a tile of tokens at a time; the last one walks the residual ring.
Each writes its normalised output and its log-sum-exp. :func:`_combine` adds them up, and rotates
the sealed part back: values are stored rotated, and rotating commutes with the weighted sum.

The products are transposed, S^T = K q^T and O^T = V^T P^T, so that the few query rows are the
small dimension of the matrix instructions and the tokens the large one. Codes enter the products
as they are, as fp16 (see :mod:`kvq_kernels.triton.common`). With s, z the scale and zero of a
channel (keys) or of a token (values):

    logit = sum_d q_d (s_d code_d + z_d) = sum_d (q_d s_d) code_d + sum_d q_d z_d
    out_d = sum_t p_t (s_t code_td + z_t) = sum_t (p_t s_t) code_td + sum_t p_t z_t

so scales cost one multiplication per query element and tile, or per weight, and zeros one number
per row and tile. Of 4-bit keys, every 32 tokens have cuts l, h of the range of their group
(:func:`kvq_kernels.reference.cut_meta`), and with n = (32 - l - h) / 32

    logit = sum_d (q_d s_d n_d) code_d + sum_d q_d s_d l_d 15 / 32 + sum_d q_d z_d

where q_d s_d and the last sum are a tile's, and the rest is made for each of its two runs of tokens
(:func:`_cut_scores`). What must not overflow or vanish in fp16:

* q_d s_d: a scale is at most 2 * 65504 / levels, since sealing saturates; queries with
  larger elements than that allows are divided by a power of two, which multiplies the fp32 sum
  again. It is one for all rows of a program. Cuts make scales smaller.
* p_t s_t: the running maximum is of logit + the exponent of s, so that the largest p_t s_t is
  close to 2^15, however large or small the scales are.
* the 1024 in front of the codes: taken away by the fp32 sum of the *rounded* operands. For keys
  that is a product with a matrix of -1024, whose rows are all the same: the compiler makes one
  matrix instruction of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton import language as tl

from kvq_kernels.formats import Format
from kvq_kernels.interface import AttentionParams, Batch, LayerCache
from kvq_kernels.triton import tuning
from kvq_kernels.triton.common import (
    CUT_TOKENS,
    LOG2_E,
    LOWEST,
    bytes_to_fp16,
    dot_dtype,
    meta_scale,
    meta_scales,
    meta_zero,
    nibbles_to_fp16,
    record_constants,
)

MAX_SPLITS = 128


# --- kernels ---------------------------------------------------------------------------------


@triton.jit
def _request(query_start_loc, seq_lens, request):
    """Return a request's first query row, its number of new tokens and its first new position.

    Padding has no new tokens, and neither has a request whose length does not cover them.
    """
    row = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - row
    start = tl.load(seq_lens + request) - query_len
    return row, tl.where(start >= 0, query_len, 0), start


@triton.jit
def _sealed_tiles(
    start,
    query_len,
    window,
    num_splits,
    WINDOW: tl.constexpr,
    UNIT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Return the first tile that a request reads, the end, and the tiles per split."""
    TILES_PER_UNIT: tl.constexpr = UNIT_SIZE // TILE
    first = 0
    if WINDOW:
        first = tl.maximum(start - window + 1, 0) // UNIT_SIZE * TILES_PER_UNIT
    end = (start + query_len - 1) // UNIT_SIZE * TILES_PER_UNIT
    return first, end, tl.maximum(tl.cdiv(end - first, num_splits), MIN_TILES)


@triton.jit
def _mask(
    logits,
    distances,
    slopes,
    soft_cap,
    window,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return logits (base 2) with soft cap, ALiBi and sliding window.

    `distances` are query minus key positions; they and `slopes` broadcast against the logits.
    """
    if SOFT_CAP:  # tanh(x) = 1 - 2 / (e^2x + 1), which is right at both infinities
        power = tl.exp2(logits * (2.0 * LOG2_E / soft_cap))
        capped = soft_cap * (1.0 - 2.0 / (power + 1.0))
        logits = tl.where(logits == float("-inf"), logits, capped)
    if ALIBI:
        logits -= slopes * distances.to(tl.float32)
    if WINDOW:
        logits = tl.where(distances < window, logits, float("-inf"))
    return logits


@triton.jit
def _anchor_logits(
    record, query0, query1, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, ANCHOR: tl.constexpr
):
    """Return the logits of a sequence's first token, ``[rows]``, from unit 0's anchor."""
    channel = tl.arange(0, HEAD_PAD // 2)
    inside = channel < HEAD_SIZE // 2
    meta = tl.load((record + ANCHOR + HEAD_SIZE).to(tl.pointer_type(tl.int32)))
    scale, zero = meta_scale(meta).to(tl.float32), meta_zero(meta).to(tl.float32)
    codes0 = tl.load(record + ANCHOR + channel, mask=inside, other=0)
    codes1 = tl.load(record + ANCHOR + HEAD_SIZE // 2 + channel, mask=inside, other=0)
    key0 = codes0.to(tl.float32) * scale + zero
    key1 = codes1.to(tl.float32) * scale + zero
    return tl.sum(query0 * key0[:, None] + query1 * (16.0 * key1)[:, None], 0)


@triton.jit
def _walk_units(
    query_rows,
    valid,
    query_pos,
    slopes,
    pages,
    block_table,
    first,
    end,
    scale_log2,
    soft_cap_log2,
    window,
    pages_stride_block,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    UNIT_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ANCHOR: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_META: tl.constexpr,
    KEY_CUTS: tl.constexpr,
    VALUE_META: tl.constexpr,
    BLOB_BYTES: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    STRADDLES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Return maximum, sum and output ``[HEAD_PAD, rows]`` over sealed tiles [first, end).

    Four-bit codes come in pairs. A byte of keys holds channels c and c + HEAD_SIZE / 2, so the
    query is kept as two halves; a byte of values holds tokens t and t + GROUP_SIZE / 2, so a tile
    is two runs of tokens. The names of what belongs to a half or a run end in 0 and 1; what is in
    one tensor for all runs has them as its last dimension.

    Codes are loaded right before their product: the pipeliner keeps tiles in shared memory and
    reads one into registers where its load stands. Their addresses are a scalar of the iteration
    plus offsets that stay the same.
    """
    TILES_PER_UNIT: tl.constexpr = UNIT_SIZE // TILE
    TILES_PER_BLOB: tl.constexpr = GROUP_SIZE // TILE
    KEY_BYTES: tl.constexpr = HEAD_SIZE * KEY_BITS // 8
    KEY_BYTES_PAD: tl.constexpr = HEAD_PAD * KEY_BITS // 8
    VALUE_BYTES: tl.constexpr = GROUP_SIZE * VALUE_BITS // 8
    RUNS: tl.constexpr = 8 // VALUE_BITS
    RUN: tl.constexpr = TILE // RUNS
    # Queries of 16 bits stay exact in fp16; scale_log2 waits until after the product.
    EXACT: tl.constexpr = tl.float32 if query_rows.dtype.element_ty == tl.float32 else tl.float16
    # The largest query element whose product with any scale fits fp16 (the header's first point);
    # 17/16 because the low nibble's operand is q0 s0 - q1 s1 / 16.
    QUERY_LIMIT: tl.constexpr = 0.995 * (2**KEY_BITS - 1) / 2 * 16 / 17

    channel = tl.arange(0, HEAD_PAD)
    inside = channel < HEAD_SIZE
    key_byte = tl.arange(0, KEY_BYTES_PAD)
    inside_key = key_byte < KEY_BYTES
    run = tl.arange(0, RUN)
    key_offsets = run[:, None] * KEY_BYTES + key_byte[None, :]
    token_offsets = run[:, None] + (tl.arange(0, RUNS) * (GROUP_SIZE // 2))[None, :]
    RUN_CUTS: tl.constexpr = GROUP_SIZE // 2 // CUT_TOKENS * HEAD_SIZE
    cut_offsets = (
        key_byte[:, None, None]
        + (tl.arange(0, 2) * KEY_BYTES)[None, :, None]
        + (tl.arange(0, 2) * RUN_CUTS)[None, None, :]
    )

    query_mask = valid[None, :] & inside_key[:, None]
    query0 = tl.load(query_rows[None, :] + key_byte[:, None], mask=query_mask, other=0.0)
    query0 = query0.to(tl.float32)
    largest = tl.max(tl.abs(query0), 0)
    if KEY_BITS == 4:
        query1 = tl.load(
            query_rows[None, :] + KEY_BYTES + key_byte[:, None], mask=query_mask, other=0.0
        )
        query1 = query1.to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(query1), 0))
    excess = tl.minimum(tl.max(largest, 0), 65504.0) / QUERY_LIMIT
    factor = tl.exp2(tl.ceil(tl.log2(tl.maximum(excess, 1.0))))
    query0 = (query0 / factor).to(EXACT)
    query1 = (query1 / (16.0 * factor)).to(EXACT) if KEY_BITS == 4 else query0
    factor *= scale_log2
    bias_query0 = query0.to(tl.float32)
    bias_query1 = 16.0 * query1.to(tl.float32)

    anchor = tl.zeros([ROWS], tl.float32)
    if ANCHOR:
        if first == 0:
            record = pages + tl.load(block_table).to(tl.int64) * pages_stride_block
            anchor = _anchor_logits(record, query0, query1, HEAD_SIZE, HEAD_PAD, ANCHOR)

    running_max = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([RUN, ROWS], tl.float32)
    acc = tl.zeros([HEAD_PAD, ROWS], tl.float32)
    for tile in tl.range(first, end):
        unit = tile // TILES_PER_UNIT
        block = tl.load(block_table + unit // UNITS_PER_BLOCK).to(tl.int64)
        blob = (
            pages
            + block * pages_stride_block
            + (unit % UNITS_PER_BLOCK) * RECORD_BYTES
            + (tile % TILES_PER_UNIT // TILES_PER_BLOB) * BLOB_BYTES
        )
        token = (tile % TILES_PER_BLOB) * RUN  # the tile's first, of the group
        key_meta = (blob + KEY_META).to(tl.pointer_type(tl.int32))
        value_meta = (blob + VALUE_META).to(tl.pointer_type(tl.int32)) + token

        key_meta0 = tl.load(key_meta + key_byte, mask=inside_key, other=0)
        value_meta = tl.load(value_meta + token_offsets)

        # Fold the key scales into the query; the bias collects zeros.
        scaled0 = (query0 * meta_scales(key_meta0, USE_ASM).to(EXACT)[:, None]).to(tl.float16)
        terms = bias_query0 * meta_zero(key_meta0).to(tl.float32)[:, None]
        if KEY_BITS == 4:
            key_meta1 = tl.load(key_meta + KEY_BYTES + key_byte, mask=inside_key, other=0)
            scaled1 = (query1 * meta_scales(key_meta1, USE_ASM).to(EXACT)[:, None]).to(tl.float16)
            terms += bias_query1 * meta_zero(key_meta1).to(tl.float32)[:, None]
            cuts = tl.load(
                (blob + KEY_CUTS + token // CUT_TOKENS * HEAD_SIZE) + cut_offsets,
                mask=inside_key[:, None, None],
                other=0,
            )
            cuts0, cuts1 = tl.split(cuts)
        bias = tl.sum(terms, 0)
        if STRADDLES:  # a row reads the units before its own; its own is in the ring
            bias += tl.where(unit < query_pos // UNIT_SIZE, 0.0, float("-inf"))

        keys = tl.load((blob + token * KEY_BYTES) + key_offsets, mask=inside_key[None, :], other=0)
        if KEY_BITS == 4:
            scores0 = _cut_scores(keys, scaled0, scaled1, cuts0, bias, USE_ASM)
        else:
            scores0 = _byte_scores(keys, scaled0, bias, USE_ASM)
        if ANCHOR:
            if tile == 0:
                first_token = anchor
                if STRADDLES:
                    first_token += tl.where(query_pos < UNIT_SIZE, float("-inf"), 0.0)
                scores0 = tl.where((run == 0)[:, None], first_token[None, :], scores0)
        if VALUE_BITS == 4:
            keys = tl.load(
                (blob + (token + GROUP_SIZE // 2) * KEY_BYTES) + key_offsets,
                mask=inside_key[None, :],
                other=0,
            )
            if KEY_BITS == 4:
                scores1 = _cut_scores(keys, scaled0, scaled1, cuts1, bias, USE_ASM)
            else:
                scores1 = _byte_scores(keys, scaled0, bias, USE_ASM)
            scores = tl.join(scores0, scores1)
        else:
            scores = tl.reshape(scores0, [RUN, ROWS, 1])  # it costs nothing, unlike [:, :, None]
        key_pos = tile // TILES_PER_BLOB * GROUP_SIZE + token + token_offsets
        logits = _mask(
            scores * factor,
            query_pos[None, :, None] - key_pos[:, None, :],
            slopes[None, :, None],
            soft_cap_log2,
            window,
            SOFT_CAP,
            ALIBI,
            WINDOW,
        )
        candidates = tl.max(logits + _exponent(value_meta)[:, None, :], 2)
        new_max = tl.maximum(running_max, tl.max(candidates, 0))
        rescale = tl.exp2(running_max - new_max)
        running_max = new_max

        # Fold the value scales into the weights; zeros and 1024s go to every channel alike.
        weights = tl.exp2(logits - new_max[None, :, None])
        scaled_weights = weights * meta_scale(value_meta).to(tl.float32)[:, None, :]
        shared = tl.sum(weights * meta_zero(value_meta).to(tl.float32)[:, None, :], 2)
        if VALUE_BITS == 4:
            scaled_weights0, scaled_weights1 = tl.split(scaled_weights)
            operand1 = scaled_weights1.to(tl.float16) * 0.0625
            operand0 = (scaled_weights0 - operand1.to(tl.float32)).to(tl.float16)
            shared -= 1024.0 * (operand0.to(tl.float32) + operand1.to(tl.float32))
        else:
            operand0 = tl.reshape(scaled_weights, [RUN, ROWS]).to(tl.float16)
            shared -= 1024.0 * operand0.to(tl.float32)
        total = total * rescale[None, :] + tl.sum(weights, 2)
        acc = acc * rescale[None, :] + tl.sum(shared, 0)[None, :]

        values = tl.load(
            (blob + VALUE_CODES + token) + (channel[:, None] * VALUE_BYTES + run[None, :]),
            mask=inside[:, None],
            other=0,
        )
        if VALUE_BITS == 4:
            low, byte = nibbles_to_fp16(values, USE_ASM)
            acc = tl.dot(byte, operand1, tl.dot(low, operand0, acc))
        else:
            acc = tl.dot(bytes_to_fp16(values, USE_ASM), operand0, acc)
    return running_max, tl.sum(total, 0), acc


@triton.jit
def _byte_scores(keys, scaled, bias, USE_ASM: tl.constexpr):
    """Return the scores, fp32 ``[tokens, rows]``, of 8-bit keys ``[tokens, channels]``.

    `scaled` is the query times the scales, fp16 ``[channels, rows]``, and `bias` what all tokens
    have in common, fp32 ``[rows]``.
    """
    scores = tl.broadcast_to(bias[None, :], (keys.shape[0], bias.shape[0]))
    minus_1024 = tl.full(keys.shape, -1024.0, tl.float16)
    scores = tl.dot(minus_1024, scaled, scores)
    return tl.dot(bytes_to_fp16(keys, USE_ASM), scaled, scores)


@triton.jit
def _cut_scores(keys, scaled0, scaled1, cuts, bias, USE_ASM: tl.constexpr):
    """Return the scores of 4-bit keys that share their `cuts`, uint8 ``[len(scaled0), 2]``.

    As :func:`_byte_scores`, for the two halves of channels; the second one is divided by 16.
    """
    cuts0, cuts1 = tl.split(cuts)
    low0, byte0 = nibbles_to_fp16(cuts0, USE_ASM)  # 1024 more than they are
    low1, byte1 = nibbles_to_fp16(cuts1, USE_ASM)
    # low / 32 and 1 - low / 32 - high / 32, exactly, whether the compiler fuses operations or not.
    shift0 = low0 * (1 / 32) - 32.0
    shift1 = low1 * 0.5 - 512.0  # with the half's 16
    narrowed0 = (33.0 - low0 * (1 / 32)) - (byte0 - low0) * (1 / 512)
    narrowed1 = (33.0 - low1 * (1 / 32)) - (byte1 - low1) * (1 / 512)
    folded1 = scaled1 * narrowed1[:, None]
    folded0 = scaled0 * narrowed0[:, None] - folded1
    shifts = scaled0 * shift0[:, None] + scaled1 * shift1[:, None]

    scores = tl.broadcast_to(bias[None, :], (keys.shape[0], bias.shape[0]))
    scores = tl.dot(tl.full(keys.shape, 15.0, tl.float16), shifts, scores)
    minus_1024 = tl.full(keys.shape, -1024.0, tl.float16)
    scores = tl.dot(minus_1024, folded1, tl.dot(minus_1024, folded0, scores))
    low, byte = nibbles_to_fp16(keys, USE_ASM)
    return tl.dot(byte, folded1, tl.dot(low, folded0, scores))


@triton.jit
def _exponent(meta):
    """Return a whole number e with scale < 2^(e + 15), for the scales in int32 words.

    The scale's five exponent bits, put above 8192 = 2^13, whose last place is 2^-10.
    """
    return ((meta & 0x7C00) | 0x46000000).to(tl.float32, bitcast=True) - (8192.0 + 29.0)


@triton.jit
def _walk_ring(
    query_rows,
    valid,
    query_pos,
    slopes,
    ring,
    ring_table,
    first,
    end,
    scale_log2,
    soft_cap_log2,
    window,
    ring_stride_block,
    ring_stride_token,
    ring_capacity,
    RING_BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    UNIT_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    RING_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Return maximum, sum and output ``[HEAD_PAD, rows]`` over positions [first, end)."""
    channel = tl.arange(0, HEAD_PAD)
    inside = channel < HEAD_SIZE
    query = tl.load(
        query_rows[None, :] + channel[:, None], mask=valid[None, :] & inside[:, None], other=0.0
    ).to(DOT_DTYPE)
    # A row reads its own unit up to itself; what lies before is sealed.
    first_visible = query_pos // UNIT_SIZE * UNIT_SIZE

    running_max = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([HEAD_PAD, ROWS], tl.float32)
    for tile_start in tl.range(first, end, RING_TILE, num_stages=2):
        key_pos = tile_start + tl.arange(0, RING_TILE)
        written = key_pos < end
        slot = key_pos % ring_capacity
        block = tl.load(ring_table + slot // RING_BLOCK, mask=written, other=0).to(tl.int64)
        tokens = ring + block * ring_stride_block + (slot % RING_BLOCK) * ring_stride_token
        keys = tl.load(
            tokens[:, None] + channel[None, :], mask=written[:, None] & inside[None, :], other=0.0
        ).to(DOT_DTYPE)
        logits = tl.dot(keys, query, input_precision="ieee") * scale_log2
        distances = query_pos[None, :] - key_pos[:, None]
        logits = _mask(
            logits, distances, slopes[None, :], soft_cap_log2, window, SOFT_CAP, ALIBI, WINDOW
        )
        visible = distances >= 0
        visible &= key_pos[:, None] >= first_visible[None, :]
        logits = tl.where(visible & written[:, None], logits, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(logits, 0))
        rescale = tl.exp2(running_max - new_max)
        running_max = new_max
        weights = tl.exp2(logits - new_max[None, :])
        total = total * rescale + tl.sum(weights, 0)
        values = tl.load(
            tokens[None, :] + HEAD_SIZE + channel[:, None],
            mask=written[None, :] & inside[:, None],
            other=0.0,
        ).to(DOT_DTYPE)
        acc = tl.dot(values, weights.to(DOT_DTYPE), acc * rescale[None, :], input_precision="ieee")
    return running_max, total, acc


@triton.jit
def _attend(
    query,
    pages,
    block_table,
    ring,
    ring_table,
    query_start_loc,
    seq_lens,
    alibi_slopes,
    partial_out,
    partial_lse,
    scale_log2,
    soft_cap_log2,
    window,
    query_stride_token,
    query_stride_head,
    pages_stride_block,
    block_table_stride,
    ring_stride_block,
    ring_stride_head,
    ring_stride_token,
    ring_table_stride,
    ring_capacity,
    RING_BLOCK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GQA: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    UNIT_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ANCHOR: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_META: tl.constexpr,
    KEY_CUTS: tl.constexpr,
    VALUE_META: tl.constexpr,
    BLOB_BYTES: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    RING_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    STRADDLES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Attend of one tile of query rows over one split.

    Grid: ``[num_splits + 1, num_kv_heads * tiles, num_requests]``; the last split is the ring.
    """
    split, request = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) % NUM_KV_HEADS
    num_splits = tl.num_programs(0) - 1
    row, query_len, start = _request(query_start_loc, seq_lens, request)
    first, end, tiles_per_split = _sealed_tiles(
        start, query_len, window, num_splits, WINDOW, UNIT_SIZE, TILE, MIN_TILES
    )
    first += split * tiles_per_split
    block_table += request.to(tl.int64) * block_table_stride
    ring_table += request.to(tl.int64) * ring_table_stride
    pages += head * (UNITS_PER_BLOCK * RECORD_BYTES)
    ring += head.to(tl.int64) * ring_stride_head

    first_row = tl.program_id(1) // NUM_KV_HEADS * ROWS
    if first_row >= query_len * GQA:
        return
    rows = first_row + tl.arange(0, ROWS)
    valid = rows < query_len * GQA
    query_head = head * GQA + rows % GQA
    query_pos = start + rows // GQA
    query_rows = (
        query
        + (row + rows // GQA).to(tl.int64) * query_stride_token
        + query_head * query_stride_head
    )
    slopes = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slopes = tl.load(alibi_slopes + query_head, mask=valid, other=0.0).to(tl.float32)
        slopes *= LOG2_E
    partial = row - tl.load(query_start_loc) + rows // GQA
    partial = (partial.to(tl.int64) * (NUM_KV_HEADS * GQA) + query_head) * (num_splits + 1)
    if split < num_splits:
        if first < end:
            last = tl.minimum(first + tiles_per_split, end)
            running_max, total, acc = _walk_units(
                query_rows,
                valid,
                query_pos,
                slopes,
                pages,
                block_table,
                first,
                last,
                scale_log2,
                soft_cap_log2,
                window,
                pages_stride_block,
                HEAD_SIZE,
                HEAD_PAD,
                UNIT_SIZE,
                GROUP_SIZE,
                KEY_BITS,
                VALUE_BITS,
                ANCHOR,
                VALUE_CODES,
                KEY_META,
                KEY_CUTS,
                VALUE_META,
                BLOB_BYTES,
                RECORD_BYTES,
                UNITS_PER_BLOCK,
                ROWS,
                TILE,
                SOFT_CAP,
                WINDOW,
                ALIBI,
                STRADDLES,
                USE_ASM,
            )
            _store_partial(
                partial_out,
                partial_lse,
                partial + split,
                valid,
                running_max,
                total,
                acc,
                HEAD_SIZE,
                HEAD_PAD,
            )
    else:
        open_start = start // UNIT_SIZE * UNIT_SIZE
        if WINDOW:
            open_start = tl.maximum(open_start, (start - window + 1) // RING_TILE * RING_TILE)
        running_max, total, acc = _walk_ring(
            query_rows,
            valid,
            query_pos,
            slopes,
            ring,
            ring_table,
            open_start,
            start + query_len,
            scale_log2,
            soft_cap_log2,
            window,
            ring_stride_block,
            ring_stride_token,
            ring_capacity,
            RING_BLOCK,
            HEAD_SIZE,
            HEAD_PAD,
            UNIT_SIZE,
            ROWS,
            RING_TILE,
            DOT_DTYPE,
            SOFT_CAP,
            WINDOW,
            ALIBI,
        )
        _store_partial(
            partial_out,
            partial_lse,
            partial + split,
            valid,
            running_max,
            total,
            acc,
            HEAD_SIZE,
            HEAD_PAD,
        )


@triton.jit
def _store_partial(
    partial_out,
    partial_lse,
    index,
    valid,
    running_max,
    total,
    acc,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Write a split's normalised output and log-sum-exp; -inf where a row saw nothing."""
    channel = tl.arange(0, HEAD_PAD)
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    tl.store(
        partial_out + index[None, :] * HEAD_SIZE + channel[:, None],
        acc * (1.0 / total)[None, :],
        mask=valid[None, :] & (channel < HEAD_SIZE)[:, None],
    )
    lse = tl.where(seen, running_max + tl.log2(total), float("-inf"))
    tl.store(partial_lse + index, lse, mask=valid)


@triton.jit
def _combine(
    partial_out,
    partial_lse,
    query_start_loc,
    seq_lens,
    sinks,
    out,
    window,
    num_splits,
    out_stride_token,
    out_stride_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    UNIT_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROTATE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add up the splits of one query head, token by token.

    Grid: ``[tokens, num_heads, num_requests]``.
    """
    head, request = tl.program_id(1), tl.program_id(2)
    row, query_len, start = _request(query_start_loc, seq_lens, request)
    first, end, tiles_per_split = _sealed_tiles(
        start, query_len, window, num_splits, WINDOW, UNIT_SIZE, TILE, MIN_TILES
    )
    num_used = tl.cdiv(end - first, tiles_per_split)
    channel = tl.arange(0, HEAD_PAD)
    inside = channel < HEAD_SIZE
    split = tl.arange(0, SPLITS_PAD)
    for token in tl.range(tl.program_id(0), query_len, tl.num_programs(0)):
        partial = row - tl.load(query_start_loc) + token
        partial = (partial.to(tl.int64) * tl.num_programs(1) + head) * (num_splits + 1)
        lse = tl.load(partial_lse + partial + split, mask=split < num_used, other=float("-inf"))
        ring_lse = tl.load(partial_lse + partial + num_splits)
        # The ring holds the query's own token, so the largest is finite.
        largest = tl.maximum(tl.max(lse, 0), ring_lse)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            largest = tl.maximum(largest, sink)
        ring_weight = tl.exp2(ring_lse - largest)
        total = tl.sum(tl.exp2(lse - largest), 0) + ring_weight
        if SINKS:
            total += tl.exp2(sink - largest)

        outputs = partial_out + partial * HEAD_SIZE
        combined = tl.zeros([HEAD_PAD], tl.float32)
        for first_split in tl.range(0, num_used, CHUNK):
            splits = first_split + tl.arange(0, CHUNK)
            used = splits < num_used
            used_lse = tl.load(partial_lse + partial + splits, mask=used, other=float("-inf"))
            sealed = tl.load(
                outputs + splits[:, None] * HEAD_SIZE + channel[None, :],
                mask=used[:, None] & inside[None, :],
                other=0.0,
            )
            combined += tl.sum(sealed * tl.exp2(used_lse - largest)[:, None], 0)
        if ROTATE:
            combined = _rotate(combined, channel, HEAD_SIZE, HEAD_PAD)
        ring = tl.load(outputs + num_splits * HEAD_SIZE + channel, mask=inside, other=0.0)
        combined = (combined + ring * ring_weight) / total
        target = out + (row + token).to(tl.int64) * out_stride_token + head * out_stride_head
        tl.store(target + channel, combined.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(x, channel, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return x H for fp32 ``x[HEAD_PAD]`` and H of :func:`kvq_kernels.formats.hadamard`.

    The fast Walsh-Hadamard transform, with the diagonal's blocks side by side: one of size n
    begins at a multiple of n, so partners c and c ^ step are in one block if n > step.
    """
    block_size = tl.zeros([HEAD_PAD], tl.int32)
    for power in tl.static_range(9):  # head sizes end at 256
        block_size = tl.where(_in_block(channel, HEAD_SIZE, 1 << power), 1 << power, block_size)
    for power in tl.static_range(8):
        if 1 << power < HEAD_PAD:
            x = tl.where(block_size > 1 << power, _butterfly(x, HEAD_PAD, 1 << power), x)
    return x * tl.rsqrt(tl.maximum(block_size, 1).to(tl.float32))


@triton.jit
def _in_block(channel, HEAD_SIZE: tl.constexpr, SIZE: tl.constexpr):
    """Return which channels are in the diagonal's block of SIZE, if there is one.

    Larger blocks come first, so it begins at HEAD_SIZE without SIZE and all lower bits.
    """
    BEGIN: tl.constexpr = HEAD_SIZE // (2 * SIZE) * (2 * SIZE)
    END: tl.constexpr = HEAD_SIZE // SIZE * SIZE
    return (channel >= BEGIN) & (channel < END)


@triton.jit
def _butterfly(x, HEAD_PAD: tl.constexpr, STEP: tl.constexpr):
    """Return x[c] + x[c + STEP] at each c without bit STEP, and x[c] - x[c + STEP] at c + STEP."""
    pairs = tl.reshape(x, [HEAD_PAD // (2 * STEP), 2, STEP])
    low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), [HEAD_PAD])


# --- launch ----------------------------------------------------------------------------------


def decode(
    query: torch.Tensor,
    cache: LayerCache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests whose new tokens are all in the ring, as :func:`reference.decode`.

    Nothing on the device is read by the host: grids depend on shapes alone, so the two launches
    can be captured into a CUDA graph. Requests are expected to have about
    ``query.shape[0] / num_requests`` new tokens each, so slice `query` and `out` to the rows of
    the batch; it is right, but slower, if they have more.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, fp32, fp16 or bf16.
        cache: the layer's cache, after :func:`seal` and :func:`write_ring`.
        batch: which tokens belong to which request. Requests without new tokens, and those whose
            length does not cover them, are skipped: their rows of `out` stay as they are.
        params: scale and masking.
        out: written, shape of `query`, any float dtype.

    Raises:
        ValueError: heads or head sizes do not fit.

    """
    fmt = cache.fmt
    num_tokens, num_heads, head_size = query.shape
    _, num_kv_heads, block_size, _ = cache.pages.shape
    (num_requests,) = batch.seq_lens.shape
    if num_requests == 0 or num_tokens == 0:
        return
    if head_size != fmt.head_size or num_heads % num_kv_heads:
        raise ValueError(
            f"Queries of {num_heads} heads of size {head_size} do not suit {num_kv_heads} kv heads "
            f"of size {fmt.head_size}."
        )
    device = tuning.device_info(query.device)
    max_query_len = min(1 + cache.ring_capacity - fmt.unit_size, num_tokens)
    plan = _plan(
        fmt,
        query.dtype,
        num_requests,
        min(triton.cdiv(num_tokens, num_requests), max_query_len),
        num_heads,
        num_kv_heads,
        cache.block_table.shape[1] * block_size,
        device,
    )
    partial_rows = min(num_tokens, num_requests * max_query_len) * num_heads * (plan.num_splits + 1)
    partial_out = torch.empty((partial_rows, head_size), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(partial_rows, dtype=torch.float32, device=query.device)

    flags = {"WINDOW": params.sliding_window is not None}
    cut = {
        "HEAD_PAD": max(32, triton.next_power_of_2(head_size)),
        "TILE": plan.tuning.tile,
        "MIN_TILES": plan.tuning.min_tiles_per_split,
    }
    row_tiles = triton.cdiv(max_query_len * num_heads // num_kv_heads, plan.rows)
    _attend[(plan.num_splits + 1, num_kv_heads * row_tiles, num_requests)](
        query,
        cache.pages,
        cache.block_table,
        cache.ring,
        cache.ring_table,
        batch.query_start_loc,
        batch.seq_lens,
        params.alibi_slopes,
        partial_out,
        partial_lse,
        params.scale * LOG2_E.value,
        (params.soft_cap or 0.0) * LOG2_E.value,
        params.sliding_window or 0,
        query.stride(0),
        query.stride(1),
        cache.pages.stride(0),
        cache.block_table.stride(0),
        cache.ring.stride(0),
        cache.ring.stride(1),
        cache.ring.stride(2),
        cache.ring_table.stride(0),
        cache.ring_capacity,
        RING_BLOCK=cache.ring.shape[2],
        NUM_KV_HEADS=num_kv_heads,
        GQA=num_heads // num_kv_heads,
        **record_constants(fmt),
        ANCHOR=fmt.anchor_codes_offset if fmt.anchor else 0,
        UNITS_PER_BLOCK=block_size // fmt.unit_size,
        ROWS=plan.rows,
        **cut,
        RING_TILE=plan.tuning.ring_tile,
        DOT_DTYPE=dot_dtype(cache.ring.dtype),
        SOFT_CAP=bool(params.soft_cap),
        ALIBI=params.alibi_slopes is not None,
        STRADDLES=max_query_len > 1,
        **flags,
        USE_ASM=device.is_nvidia,
        num_warps=plan.tuning.num_warps,
        num_stages=plan.tuning.num_stages,
        enable_fp_fusion=True,  # Triton 3.10 no longer does it unasked
    )
    _combine[(plan.query_len, num_heads, num_requests)](
        partial_out,
        partial_lse,
        batch.query_start_loc,
        batch.seq_lens,
        params.sinks,
        out,
        params.sliding_window or 0,
        plan.num_splits,
        out.stride(0),
        out.stride(1),
        HEAD_SIZE=head_size,
        UNIT_SIZE=fmt.unit_size,
        **cut,
        SPLITS_PAD=triton.next_power_of_2(plan.num_splits),
        CHUNK=8,
        ROTATE=fmt.rotate_values,
        SINKS=params.sinks is not None,
        **flags,
        num_warps=4,
    )


def workspace_bytes(
    fmt: Format,
    max_num_requests: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Return the bytes that no call of :func:`decode` exceeds in what it takes from torch.

    Args:
        fmt: format of the pages.
        max_num_requests: requests in a batch, padding included.
        max_query_len: new tokens per request: ``ceil(num_tokens / num_requests)`` of any call.
        num_heads: query heads.
        num_kv_heads: kv heads.
        max_model_len: tokens that a block table covers: its width times block_size.
        device: where it runs.

    """
    info = tuning.device_info(device)
    dtype = torch.float16  # others are cut into no more splits
    return 4 * max(
        requests * query_len * num_heads * (fmt.head_size + 1) * (plan.num_splits + 1)
        for requests in range(1, max_num_requests + 1)
        for query_len in range(1, max_query_len + 1)
        for plan in [
            _plan(fmt, dtype, requests, query_len, num_heads, num_kv_heads, max_model_len, info)
        ]
    )


@dataclass(frozen=True)
class _Plan:
    """The cut of one call.

    Attributes:
        tuning: of the kernel.
        query_len: new tokens per request that the cut is best for.
        rows: query rows per program.
        num_splits: programs that share its sealed tokens.

    """

    tuning: tuning.DecodeTuning
    query_len: int
    rows: int
    num_splits: int


def _plan(
    fmt: Format,
    dtype: torch.dtype,
    num_requests: int,
    query_len: int,
    num_heads: int,
    num_kv_heads: int,
    max_model_len: int,
    device: tuning.DeviceInfo,
) -> _Plan:
    """Return the cut that keeps the device busy, from what the host knows."""
    query_rows = query_len * (num_heads // num_kv_heads)
    tuned = tuning.decode_tuning(fmt, dtype, query_rows, device.arch)
    rows = min(max(tuned.min_rows, triton.next_power_of_2(query_rows)), tuned.max_rows)
    programs = num_requests * num_kv_heads * triton.cdiv(query_rows, rows)
    wanted = device.multiprocessors * tuned.programs_per_multiprocessor // programs
    useful = max_model_len // (tuned.tile * tuned.min_tiles_per_split)
    num_splits = max(1, min(wanted, useful, MAX_SPLITS))
    return _Plan(tuned, query_len, rows, num_splits)
