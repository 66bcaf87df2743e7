"""What storing and prefill share on the device: which rows a program works on, and the rotation.

All lengths are on the device only, so grids are upper bounds that follow from the number of
tokens and requests, and a program looks up what it has to do.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from triton import language as tl

from kvq_kernels.formats import Format, hadamard
from kvq_kernels.triton.common import is_interpreted

FP16_MAX: tl.constexpr = tl.constexpr(65504.0)
_FP32_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def find_tile(
    query_start_loc,
    seq_lens,
    num_requests,
    tile,
    TILE: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Find the request of a tile of `TILE` tokens, and where its tokens lie.

    Request r owns ``floor(rows up to its end / TILE) - floor(rows up to its start / TILE) +
    SPARE`` tiles, at least ``floor(its new tokens / TILE) + SPARE``; see :func:`num_tiles`.

    Returns:
        request, number of the tile within the request, row of the request's first new token,
        and the first and the end position of the new tokens.

    """
    origin = tl.load(query_start_loc).to(tl.int32)
    low = tl.full((), 0, tl.int32)
    high = num_requests + low
    while high - low > 1:  # the first tile of `low` is at or before `tile`, that of `high` is not
        middle = (low + high) // 2
        first = (tl.load(query_start_loc + middle).to(tl.int32) - origin) // TILE + SPARE * middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle)
    row = tl.load(query_start_loc + low).to(tl.int32)
    new_tokens = tl.load(query_start_loc + low + 1).to(tl.int32) - row
    end = tl.load(seq_lens + low).to(tl.int32)
    return low, tile - (row - origin) // TILE - SPARE * low, row, end - new_tokens, end


def num_tiles(num_tokens: int, num_requests: int, tile: int, spare: int) -> int:
    """Return how many tiles :func:`find_tile` hands out at most."""
    return num_tokens // tile + spare * num_requests


@triton.jit
def load_tokens(
    source,
    positions,
    valid,
    channels,
    inside,
    RING_CAPACITY: tl.constexpr,
    RING_BLOCK: tl.constexpr,
):
    """Load a request's keys (or values) of one kv head, ``[len(positions), len(channels)]``.

    `source` is (pointer to the request's first new token, stride of new tokens, its position;
    pointer to the ring, its strides of blocks and tokens, the request's row of the ring table).
    New tokens are the step's own, earlier ones are in the ring. What is not `valid` (by position)
    and `inside` (by channel) is 0 and not read.
    """
    new, new_stride, start, ring, ring_stride_block, ring_stride_token, ring_table = source
    is_new = positions >= start
    slots = positions % RING_CAPACITY
    blocks = tl.load(ring_table + slots // RING_BLOCK, mask=valid & ~is_new, other=0)
    ring += blocks.to(tl.int64) * ring_stride_block + (slots % RING_BLOCK) * ring_stride_token
    new += (positions - start).to(tl.int64) * new_stride
    # Two loads, of which a unit that lies wholly in the step does not do the first: one load
    # through selected pointers would not be vectorised.
    x = tl.load(
        ring[:, None] + channels[None, :],
        mask=(valid & ~is_new)[:, None] & inside[None, :],
        other=0.0,
    )
    return tl.load(
        new[:, None] + channels[None, :],
        mask=(valid & is_new)[:, None] & inside[None, :],
        other=x,
    )


@triton.jit
def is_finite(x):
    return tl.abs(x) <= _FP32_MAX


@triton.jit
def limit(x):
    """Return fp32 `x` limited to fp16's range, with NaN as 0."""
    return tl.clamp(tl.where(x == x, x, 0.0), -FP16_MAX, FP16_MAX)


@lru_cache(maxsize=64)
def rotation(head_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`kvq_kernels.formats.hadamard` as :func:`multiply_by_signs` takes it.

    Returns:
        the signs, bf16 ``[head_size, head_size]`` of 1, -1 and, outside of the diagonal blocks, 0;
        the size of an element in each column, fp32 ``[head_size]``.

    """
    matrix = hadamard(head_size)
    return matrix.sign().to(device, torch.bfloat16), matrix.abs().amax(0).to(device)


def prepare(fmt: Format, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Create what the kernels keep on the device; see :func:`kvq_kernels.reference.prepare`."""
    return rotation(fmt.head_size, device)


@triton.jit
def multiply_by_signs(x, signs, total, PIECES: tl.constexpr):
    """Return `total` plus fp32 `x` times part of the matrix of signs, on tensor cores.

    `x` is cut into `PIECES` bf16 numbers of 8 bits each, and the signs are exact in bf16, so that
    products are exact and sums are fp32. Two pieces hold any fp16 or bf16 number, three any fp32
    number. 0 pieces is an fp32 product, for the interpreter, whose bf16 is broken.
    """
    if PIECES == 0:
        return tl.dot(x, signs.to(tl.float32), total, input_precision="ieee")
    for _ in tl.static_range(PIECES):
        piece = x.to(tl.bfloat16)
        total = tl.dot(piece, signs, total)
        x -= piece.to(tl.float32)
    return total


def rotation_pieces(dtype: torch.dtype) -> int:
    """Return the `PIECES` that hold any number of `dtype`."""
    if is_interpreted():
        return 0
    return 3 if dtype == torch.float32 else 2
