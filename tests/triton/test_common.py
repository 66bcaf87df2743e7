"""The conversions' plain form; tests/kernels/test_compile_report.py proves the other one equal."""

import torch
import triton
from triton import language as tl

from kvq_kernels.triton.common import bytes_to_fp16, meta_scale, meta_zero, nibbles_to_fp16


@triton.jit
def _unpack(codes, low_out, byte_out, whole_out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    packed = tl.load(codes + offsets)
    low, byte = nibbles_to_fp16(packed, False)
    tl.store(low_out + offsets, low)
    tl.store(byte_out + offsets, byte)
    tl.store(whole_out + offsets, bytes_to_fp16(packed, False))


@triton.jit
def _split_meta(words, scale_out, zero_out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    meta = tl.load(words + offsets)
    tl.store(scale_out + offsets, meta_scale(meta))
    tl.store(zero_out + offsets, meta_zero(meta))


def test_every_byte() -> None:
    codes = torch.arange(256).to(torch.uint8)
    low, byte, whole = (torch.empty(256, dtype=torch.float16) for _ in range(3))
    _unpack[(1,)](codes, low, byte, whole, 256)
    assert torch.equal(low, 1024 + (codes & 15).half())
    assert torch.equal(byte, 1024 + codes.half())
    assert torch.equal(whole, byte)


def test_meta_words() -> None:
    pairs = torch.tensor([[0.5, -65504.0], [65504.0, 0.0], [6e-8, 3.0], [0.0, -0.25]]).half()
    scale, zero = torch.empty(4, dtype=torch.float16), torch.empty(4, dtype=torch.float16)
    _split_meta[(1,)](pairs.view(torch.int32).flatten(), scale, zero, 4)
    assert torch.equal(torch.stack([scale, zero], 1), pairs)
