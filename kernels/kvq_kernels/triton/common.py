"""What several Triton kernels need: constants, the record's offsets, conversions."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
from triton import language as tl

from kvq_kernels import formats
from kvq_kernels.formats import Format

CUT_TOKENS = tl.constexpr(formats.CUT_TOKENS)
CUT_STEPS = tl.constexpr(formats.CUT_STEPS)
LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1e30)
"""Where running maxima begin: finite, so that hidden logits, -inf, weigh exp2(-inf) = 0."""

# Codes become fp16 without a conversion instruction: the bits 0x6400 | code are 1024 + code.
# Kernels take the 1024 away where it costs less, or never add it up in the first place.
# `prmt` puts four code bytes into the low bytes of four fp16 lanes whose high bytes are 0x64;
# `and` keeps the low nibbles. Both forms are elementwise: no lane sees another's byte.
BYTES_ASM = tl.constexpr(
    """
    prmt.b32 $0, $2, 0x64646464, 0x4140;
    prmt.b32 $1, $2, 0x64646464, 0x4342;
    """
)
NIBBLES_ASM = tl.constexpr(
    """
    prmt.b32 $2, $4, 0x64646464, 0x4140;
    prmt.b32 $3, $4, 0x64646464, 0x4342;
    and.b32 $0, $2, 0x640f640f;
    and.b32 $1, $3, 0x640f640f;
    """
)
SCALES_ASM = tl.constexpr("prmt.b32 $0, $1, $2, 0x5410;")


@triton.jit
def bytes_to_fp16(codes, USE_ASM: tl.constexpr):
    """Return 1024 + code in fp16 for uint8 `codes`."""
    if USE_ASM:
        return tl.inline_asm_elementwise(
            BYTES_ASM, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def nibbles_to_fp16(codes, USE_ASM: tl.constexpr):
    """Return 1024 + low nibble and 1024 + the whole byte in fp16 for uint8 `codes`.

    The high nibble is never isolated: ``a * low + b * high = (a - b / 16) * low + b / 16 * byte``.
    """
    if USE_ASM:
        low, byte = tl.inline_asm_elementwise(
            NIBBLES_ASM,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.int16)
        low = ((wide & 0xF) | 0x6400).to(tl.float16, bitcast=True)
        byte = (wide | 0x6400).to(tl.float16, bitcast=True)
    return low, byte


@triton.jit
def meta_scale(meta):
    """Return the scale of int32 words that hold (fp16 scale, fp16 zero), in fp16."""
    return (meta & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def meta_scales(meta, USE_ASM: tl.constexpr):
    """Return :func:`meta_scale`, in registers that hold neighbours side by side.

    Otherwise products with fp16 vectors come in pairs across rows and have to be taken apart.
    """
    if USE_ASM:
        return tl.inline_asm_elementwise(
            SCALES_ASM, "=r,r,r", [meta], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return meta_scale(meta)


@triton.jit
def meta_zero(meta):
    """Return the zero of int32 words that hold (fp16 scale, fp16 zero), in fp16."""
    return (meta >> 16).to(tl.int16).to(tl.float16, bitcast=True)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which tokens of `dtype` enter matrix products.

    It is `dtype`, but the interpreter computes bf16 wrongly and without a word.
    """
    if is_interpreted():
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[
        dtype
    ]


@lru_cache(maxsize=64)
def record_constants(fmt: Format) -> dict[str, int]:
    """Return the sizes and offsets of a record as kernels' compile-time constants."""
    return {
        "HEAD_SIZE": fmt.head_size,
        "UNIT_SIZE": fmt.unit_size,
        "GROUP_SIZE": fmt.key_group_size,
        "KEY_BITS": fmt.key_bits,
        "VALUE_BITS": fmt.value_bits,
        "VALUE_CODES": fmt.value_codes_offset,
        "KEY_META": fmt.key_meta_offset,
        "KEY_CUTS": fmt.key_cuts_offset,
        "VALUE_META": fmt.value_meta_offset,
        "BLOB_BYTES": fmt.blob_bytes,
        "RECORD_BYTES": fmt.record_bytes,
    }
