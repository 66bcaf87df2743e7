"""Quantise complete units into records, and write the newest tokens to the ring.

One program seals one blob (a key group) of one kv head of one unit: every number of a blob
depends on that blob's tokens alone, except that the first blob's program also writes the anchor,
the flag and the padding. Which units a step completes is known on the device only; the grid covers
all that it could complete, and the other programs end at once.

Records are the oracle's to the bit: fp32 arithmetic, IEEE division, the rounded scale and zero,
round half to even. The one exception is the rotation of values, whose sums are in another order
than a matrix product of PyTorch's; a rotated value differs by a few units in the last place of
fp32, which now and then moves a code by one or a scale to the next fp16.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from kvq_kernels import formats
from kvq_kernels.interface import Batch, LayerCache
from kvq_kernels.triton import tuning
from kvq_kernels.triton.blocks import (
    find_tile,
    is_finite,
    limit,
    load_tokens,
    multiply_by_signs,
    num_tiles,
    rotation,
    rotation_pieces,
)
from kvq_kernels.triton.common import CUT_STEPS, CUT_TOKENS

RING_TILE = 16
"""Tokens that one program writes to the ring at a time."""

MAX_CUT = tl.constexpr(float(formats.MAX_CUT))
_TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it leaves a small number, rounded half to even, in the low bits."""


# --- quantisation ----------------------------------------------------------------------------


@triton.jit
def _quantise(x, in_range, LEVELS: tl.constexpr, AXIS: tl.constexpr):
    """Quantise fp32 `x` with one scale and zero along `AXIS`, as ``reference._quantise``.

    Only elements with `in_range` choose the range; the others saturate.

    Returns:
        int32 words of fp16 scale and fp16 zero, the scale first in memory; int32 codes.

    """
    low, high = _range(x, in_range, AXIS)
    scale, zero = _choose_meta(low, high, LEVELS)
    codes = _encode(x, zero.to(tl.float32), _inverse(scale.to(tl.float32)), LEVELS)
    return tl.reshape(_words(scale, zero), [x.shape[1 - AXIS]]), codes


@triton.jit
def _quantise_cut(x, in_range, LEVELS: tl.constexpr):
    """Quantise fp32 ``x[parts, CUT_TOKENS, channels]``, as ``reference._quantise_keys``.

    Returns:
        int32 words of fp16 scale and fp16 zero, ``[channels]``; cuts, int32 ``[parts, channels]``;
        int32 codes, shape of `x`.

    """
    lows, highs = _range(x, in_range, 1)
    scale, zero = _choose_meta(
        tl.min(lows, 0, keep_dims=True), tl.max(highs, 0, keep_dims=True), LEVELS
    )
    words = tl.reshape(_words(scale, zero), [x.shape[2]])
    scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    inverse = _inverse(scale)

    empty = lows > highs  # the part leaves nothing out, and its infinities may not be computed with
    STEPS_PER_LEVEL: tl.constexpr = CUT_STEPS / LEVELS
    low = (tl.where(empty, 0.0, lows) - zero) * inverse * STEPS_PER_LEVEL
    high = (tl.where(empty, 0.0, highs) - zero) * inverse
    high = (high * -1.0 + LEVELS) * STEPS_PER_LEVEL
    low = tl.where(empty, 0, _round(low, MAX_CUT))
    high = tl.where(empty, 0, _round(high, MAX_CUT))

    part_zero = zero + scale * (low.to(tl.float32) * (LEVELS / CUT_STEPS))
    part_scale = scale * ((low + high).to(tl.float32) * (-1 / CUT_STEPS) + 1.0)
    codes = _encode(x, part_zero, _inverse(part_scale), LEVELS)
    return words, tl.reshape(low | high << 4, [x.shape[0], x.shape[2]]), codes


@triton.jit
def _range(x, in_range, AXIS: tl.constexpr):
    """Return the least and greatest element with `in_range`; infinity and -infinity if none is."""
    low = tl.min(tl.where(in_range, x, float("inf")), AXIS, keep_dims=True)
    high = tl.max(tl.where(in_range, x, float("-inf")), AXIS, keep_dims=True)
    return low, high


@triton.jit
def _choose_meta(low, high, LEVELS: tl.constexpr):
    """Return scale and zero, fp16, of a range."""
    empty = low > high
    low, high = tl.where(empty, 0.0, low), tl.where(empty, 0.0, high)
    return tl.div_rn(high - low, LEVELS).to(tl.float16), low.to(tl.float16)


@triton.jit
def _words(scale, zero):
    """Return int32 words of fp16 scale and fp16 zero, the scale first in memory."""
    word = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return word | zero.to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def _inverse(scale):
    """Return 1 / fp32 `scale`, 0 where it is 0."""
    positive = scale > 0
    return tl.where(positive, tl.div_rn(1.0, tl.where(positive, scale, 1.0)), 0.0)


@triton.jit
def _encode(x, zero, inverse, LEVELS: tl.constexpr):
    """Return int32 codes of fp32 `x`."""
    return _round((x - zero) * inverse, LEVELS)


@triton.jit
def _round(x, LARGEST: tl.constexpr):
    """Return fp32 `x` as int32, limited to 0 and `LARGEST` of up to 255."""
    return (tl.clamp(x, 0.0, LARGEST) + _TO_INTEGER).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def _seal_keys(
    source,
    first,
    blob,
    FMT: tl.constexpr,
    TILE: tl.constexpr,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
):
    """Write key codes, meta and cuts of the blob that starts at position `first`.

    `TILE` bytes of each token's codes at a time.
    """
    G: tl.constexpr = FMT.key_group_size
    BITS: tl.constexpr = FMT.key_bits
    WIDTH: tl.constexpr = FMT.head_size * BITS // 8
    PARTS: tl.constexpr = [FMT.num_cuts, CUT_TOKENS, TILE]
    positions = first + tl.arange(0, G)
    choosing = positions > 0 if FMT.anchor else positions >= 0
    codes = blob + FMT.key_codes_offset + tl.arange(0, G)[:, None] * WIDTH
    meta = (blob + FMT.key_meta_offset).to(tl.pointer_type(tl.int32))
    if FMT.num_cuts:
        cuts = blob + FMT.key_cuts_offset + tl.arange(0, FMT.num_cuts)[:, None] * FMT.head_size
    for column in tl.range(0, WIDTH, TILE):
        columns = column + tl.arange(0, TILE)
        inside = columns < WIDTH
        packed = tl.zeros([G, TILE], tl.int32)
        for half in tl.static_range(8 // BITS):  # the channels that share a byte
            channels = columns + half * WIDTH
            x = load_tokens(
                source, positions, positions >= 0, channels, inside, RING_CAPACITY, RING_BLOCK
            ).to(tl.float32)
            in_range = is_finite(x) & choosing[:, None]
            if FMT.num_cuts:
                words, half_cuts, half_codes = _quantise_cut(
                    limit(x).reshape(PARTS), in_range.reshape(PARTS), 2.0**BITS - 1
                )
                half_codes = half_codes.reshape([G, TILE])
                tl.store(cuts + channels[None, :], half_cuts.to(tl.uint8), mask=inside[None, :])
            else:
                words, half_codes = _quantise(limit(x), in_range, 2.0**BITS - 1, AXIS=0)
            tl.store(meta + channels, words, mask=inside)
            packed |= half_codes << half * BITS
        tl.store(codes + columns[None, :], packed.to(tl.uint8), mask=inside[None, :])


@triton.jit
def _load_rotated(
    source,
    positions,
    signs,
    FMT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
):
    """Load values and rotate them, up to the size of the matrix's elements.

    fp32 ``[len(positions), BLOCK_D]``, 0 beyond the head size.
    """
    D: tl.constexpr = FMT.head_size
    STEP: tl.constexpr = 32
    columns = tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros([positions.shape[0], BLOCK_D], tl.float32)
    for channel in tl.range(0, D, STEP):
        channels = channel + tl.arange(0, STEP)
        x = load_tokens(
            source,
            positions,
            positions >= 0,
            channels,
            channels < D,
            RING_CAPACITY,
            RING_BLOCK,
        )
        rows = signs + channels[:, None] * D
        matrix = tl.load(rows + columns, mask=(channels < D)[:, None] & (columns < D), other=0.0)
        total = multiply_by_signs(limit(x.to(tl.float32)), matrix, total, PIECES)
    return total


@triton.jit
def _seal_values(
    source,
    first,
    blob,
    signs,
    sizes,
    FMT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
):
    """Write value codes and meta of the blob that starts at position `first`.

    `TILE` bytes of each channel's codes at a time.
    """
    BITS: tl.constexpr = FMT.value_bits
    WIDTH: tl.constexpr = FMT.key_group_size * BITS // 8
    channels = tl.arange(0, BLOCK_D)
    inside = channels < FMT.head_size
    codes = blob + FMT.value_codes_offset + channels[None, :] * WIDTH
    meta = (blob + FMT.value_meta_offset).to(tl.pointer_type(tl.int32))
    for column in tl.range(0, WIDTH, TILE):
        columns = column + tl.arange(0, TILE)
        packed = tl.zeros([TILE, BLOCK_D], tl.int32)
        for half in tl.static_range(8 // BITS):  # the tokens that share a byte
            tokens = columns + half * WIDTH
            if FMT.rotate_values:
                x = _load_rotated(
                    source, first + tokens, signs, FMT, BLOCK_D, PIECES, RING_CAPACITY, RING_BLOCK
                )
                size = tl.load(sizes + channels, mask=inside, other=0.0)
                x = limit(x * size[None, :])
                in_range = (x == x) & inside[None, :]
            else:
                x = load_tokens(
                    source, first + tokens, tokens >= 0, channels, inside, RING_CAPACITY, RING_BLOCK
                ).to(tl.float32)
                in_range = is_finite(x) & inside[None, :]
                x = limit(x)
            words, half_codes = _quantise(x, in_range, 2.0**BITS - 1, AXIS=1)
            tl.store(meta + tokens, words)
            packed |= half_codes << half * BITS
        tl.store(codes + columns[:, None], packed.to(tl.uint8), mask=inside[None, :])


@triton.jit
def _seal_rest(
    source,
    first,
    record,
    FMT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
):
    """Write what follows the blobs: the anchor and its flag if the format has them, padding."""
    if FMT.anchor:
        channels = tl.arange(0, BLOCK_D)
        inside = channels < FMT.head_size
        position = first + tl.arange(0, 1)
        x = load_tokens(
            source, position, position >= 0, channels, inside, RING_CAPACITY, RING_BLOCK
        ).to(tl.float32)
        in_range = is_finite(x) & inside[None, :]
        word, codes = _quantise(limit(x), in_range, 255.0, AXIS=1)
        to = record + FMT.anchor_codes_offset + channels
        tl.store(to[None, :], codes.to(tl.uint8), mask=inside[None, :])
        meta = (record + FMT.anchor_meta_offset).to(tl.pointer_type(tl.int32))
        tl.store(meta + tl.arange(0, 1), word)
        tl.store(record + FMT.anchor_flag_offset, (first == 0).to(tl.uint8))
    PADDING: tl.constexpr = FMT.record_bytes - FMT.content_bytes
    if PADDING > 0:
        offsets = tl.arange(0, triton.next_power_of_2(PADDING))
        zeros = tl.zeros([triton.next_power_of_2(PADDING)], tl.uint8)
        tl.store(record + FMT.content_bytes + offsets, zeros, mask=offsets < PADDING)


# --- the ring --------------------------------------------------------------------------------


@triton.jit
def _write_rows(
    key_source,
    value_source,
    positions,
    inside,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
):
    """Write a request's new tokens at `positions`, where `inside`, to the ring of one kv head."""
    key, key_stride, start, ring, ring_stride_block, ring_stride_token, ring_table = key_source
    value, value_stride = value_source[0], value_source[1]
    slots = positions % RING_CAPACITY
    blocks = tl.load(ring_table + slots // RING_BLOCK, mask=inside, other=0).to(tl.int64)
    to = ring + blocks * ring_stride_block + (slots % RING_BLOCK) * ring_stride_token
    rows = (positions - start).to(tl.int64)
    channels = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (channels < D)
    k = tl.load(key + (rows * key_stride)[:, None] + channels, mask=mask)
    v = tl.load(value + (rows * value_stride)[:, None] + channels, mask=mask)
    tl.store(to[:, None] + channels, k, mask=mask)
    tl.store(to[:, None] + D + channels, v, mask=mask)


# --- kernels ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_requests"])
def _seal_kernel(
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
    num_requests,
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
    FMT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    RING_TILE: tl.constexpr,
    PIECES: tl.constexpr,
    WRITE_RING: tl.constexpr,
):
    """Seal one blob, and with `WRITE_RING` write the ring of a request and kv head.

    Grid: ``[num_tiles(num_tokens, num_requests, unit_size, 1), num_kv_heads, num_blobs]``.
    """
    U: tl.constexpr = FMT.unit_size
    request, tile, row, start, end = find_tile(
        query_start_loc, seq_lens, num_requests, tl.program_id(0), U, SPARE=1
    )
    head = tl.program_id(1)
    blob = tl.program_id(2)
    key += row.to(tl.int64) * key_stride_token + head * key_stride_head
    value += row.to(tl.int64) * value_stride_token + head * value_stride_head
    ring += head * ring_stride_head
    ring_table += request.to(tl.int64) * ring_table_stride
    key_source = (
        key,
        key_stride_token,
        start,
        ring,
        ring_stride_block,
        ring_stride_token,
        ring_table,
    )
    value_source = (
        value,
        value_stride_token,
        start,
        ring + FMT.head_size,
        ring_stride_block,
        ring_stride_token,
        ring_table,
    )

    if WRITE_RING and (tile == 0) & (blob == 0):
        # Programs that seal run beside this one, and read from the ring what precedes `start` in
        # its unit. Two positions share a slot if they differ by a multiple of the capacity, but
        # from the first one read to the last one written it is less than that:
        # (end - 1) - (start - start % U) <= new tokens - 1 + U - 1 <= capacity - 1.
        for first in tl.range(start, end, RING_TILE):
            positions = first + tl.arange(0, RING_TILE)
            _write_rows(
                key_source,
                value_source,
                positions,
                positions < end,
                FMT.head_size,
                BLOCK_D,
                RING_CAPACITY,
                RING_BLOCK,
            )

    unit = start // U + tile
    if unit < end // U:
        block_table += request.to(tl.int64) * block_table_stride
        block = tl.load(block_table + unit // UNITS_PER_BLOCK).to(tl.int64)
        number = head * UNITS_PER_BLOCK + unit % UNITS_PER_BLOCK
        record = pages + block * pages_stride_block + number * FMT.record_bytes
        first = unit * U + blob * FMT.key_group_size
        to = record + blob * FMT.blob_bytes
        _seal_keys(key_source, first, to, FMT, KEY_TILE, RING_CAPACITY, RING_BLOCK)
        _seal_values(
            value_source,
            first,
            to,
            signs,
            sizes,
            FMT,
            BLOCK_D,
            VALUE_TILE,
            PIECES,
            RING_CAPACITY,
            RING_BLOCK,
        )
        if blob == 0:
            _seal_rest(key_source, first, record, FMT, BLOCK_D, RING_CAPACITY, RING_BLOCK)


@triton.jit(do_not_specialize=["num_requests"])
def _write_ring_kernel(
    key,
    value,
    ring,
    ring_table,
    query_start_loc,
    seq_lens,
    num_requests,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    ring_stride_block,
    ring_stride_head,
    ring_stride_token,
    ring_table_stride,
    D: tl.constexpr,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RING_TILE: tl.constexpr,
):
    """Write up to `RING_TILE` tokens of one kv head.

    Grid: ``[num_tiles(num_tokens, num_requests, RING_TILE, 1), num_kv_heads]``.
    """
    request, tile, row, start, end = find_tile(
        query_start_loc, seq_lens, num_requests, tl.program_id(0), RING_TILE, SPARE=1
    )
    head = tl.program_id(1)
    key += row.to(tl.int64) * key_stride_token + head * key_stride_head
    value += row.to(tl.int64) * value_stride_token + head * value_stride_head
    ring += head * ring_stride_head
    ring_table += request.to(tl.int64) * ring_table_stride
    first = start + tile * RING_TILE
    newest = end - RING_CAPACITY  # what is older would be overwritten
    if (first < end) & (first + RING_TILE > newest):
        positions = first + tl.arange(0, RING_TILE)
        _write_rows(
            (
                key,
                key_stride_token,
                start,
                ring,
                ring_stride_block,
                ring_stride_token,
                ring_table,
            ),
            (value, value_stride_token),
            positions,
            (positions < end) & (positions >= newest),
            D,
            BLOCK_D,
            RING_CAPACITY,
            RING_BLOCK,
        )


# --- operations ------------------------------------------------------------------------------


def seal(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """Seal every unit that this step's tokens complete, as :func:`reference.seal`: one launch.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``, of the ring's dtype.
        value: as `key`.
        cache: the layer's cache; its pages are written.
        batch: which tokens belong to which request.

    Raises:
        TypeError: `key` or `value` have another dtype than the ring.

    """
    _seal(key, value, cache, batch, write_ring=False)


def store(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """Seal and write the ring, as :func:`reference.store`: one launch.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``, of the ring's dtype, at
            most ``1 + ring_capacity - unit_size`` per request.
        value: as `key`.
        cache: the layer's cache; its pages and its ring are written.
        batch: which tokens belong to which request.

    Raises:
        TypeError: `key` or `value` have another dtype than the ring.

    """
    _seal(key, value, cache, batch, write_ring=True)


def _seal(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch, write_ring: bool
) -> None:
    _check(key, value, cache)
    fmt = cache.fmt
    (num_requests,) = batch.seq_lens.shape
    num_tokens, num_kv_heads, head_size = key.shape
    if num_requests == 0:
        return
    cut = tuning.seal_tuning(fmt, tuning.device_info(key.device).arch)
    grid = (num_tiles(num_tokens, num_requests, fmt.unit_size, 1), num_kv_heads, fmt.num_blobs)
    _seal_kernel[grid](
        key,
        value,
        cache.pages,
        cache.block_table,
        cache.ring,
        cache.ring_table,
        batch.query_start_loc,
        batch.seq_lens,
        *rotation(head_size, key.device),
        num_requests,
        *key.stride()[:2],
        *value.stride()[:2],
        cache.pages.stride(0),
        cache.block_table.stride(0),
        *cache.ring.stride()[:3],
        cache.ring_table.stride(0),
        FMT=fmt,
        UNITS_PER_BLOCK=cache.pages.shape[2] // fmt.unit_size,
        RING_CAPACITY=cache.ring_capacity,
        RING_BLOCK=cache.ring.shape[2],
        BLOCK_D=triton.next_power_of_2(head_size),
        KEY_TILE=cut.key_tile,
        VALUE_TILE=cut.value_tile,
        RING_TILE=RING_TILE,
        PIECES=rotation_pieces(key.dtype),
        WRITE_RING=write_ring,
        num_warps=cut.num_warps,
        enable_fp_fusion=False,  # the oracle's arithmetic, operation by operation
    )


def write_ring(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """Write this step's tokens to the ring, as :func:`reference.write_ring`: one launch.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``, of the ring's dtype.
        value: as `key`.
        cache: the layer's cache; its ring is written.
        batch: which tokens belong to which request.

    Raises:
        TypeError: `key` or `value` have another dtype than the ring.

    """
    _check(key, value, cache)
    (num_requests,) = batch.seq_lens.shape
    num_tokens, num_kv_heads, head_size = key.shape
    if num_requests == 0:
        return
    grid = (num_tiles(num_tokens, num_requests, RING_TILE, 1), num_kv_heads)
    _write_ring_kernel[grid](
        key,
        value,
        cache.ring,
        cache.ring_table,
        batch.query_start_loc,
        batch.seq_lens,
        num_requests,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.ring.stride()[:3],
        cache.ring_table.stride(0),
        D=head_size,
        RING_CAPACITY=cache.ring_capacity,
        RING_BLOCK=cache.ring.shape[2],
        BLOCK_D=triton.next_power_of_2(head_size),
        RING_TILE=RING_TILE,
        num_warps=4,
    )


def _check(key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> None:
    if not key.dtype == value.dtype == cache.ring.dtype:
        raise TypeError(
            f"A ring of {cache.ring.dtype} cannot hold {key.dtype} keys and {value.dtype} values."
        )
