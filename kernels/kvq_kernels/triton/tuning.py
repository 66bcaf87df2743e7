"""What the kernels' speed depends on and their results do not, by architecture.

The environment variable ``KVQ_TUNING``, read at import, overrides any field of a kernel's tuning,
on every shape::

    KVQ_TUNING='{"decode": {"num_warps": 2, "num_stages": 4}}'

Nothing here was timed yet: the values come from the compiler's output (see
``benchmarks/compile_report.py``).
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kvq_kernels.formats import CUT_TOKENS, Format
from kvq_kernels.triton.common import is_interpreted

OVERRIDES: dict[str, dict[str, int]] = json.loads(os.environ.get("KVQ_TUNING", "{}"))
"""Kernel to field to value; programs that tune may change it."""


@dataclass(frozen=True)
class DeviceInfo:
    """What the choice of a tuning needs to know of a device.

    Attributes:
        arch: ``sm_90``, ``gfx942`` and so on; ``interpreter`` on a CPU.
        multiprocessors: streaming multiprocessors or compute units.

    """

    arch: str
    multiprocessors: int

    @property
    def is_nvidia(self) -> bool:
        return self.arch.startswith("sm_")


@lru_cache(maxsize=64)
def device_info(device: torch.device) -> DeviceInfo:
    """Return what `device` is."""
    if is_interpreted():
        return DeviceInfo("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return DeviceInfo(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    arch = f"sm_{properties.major}{properties.minor}"
    return DeviceInfo(arch, properties.multi_processor_count)


@dataclass(frozen=True)
class DecodeTuning:
    """How the decode kernel is cut.

    Attributes:
        num_warps: warps per program.
        num_stages: depth of the software pipeline, the block table's load included.
        tile: sealed tokens per iteration, a divisor of the key group size; with 4-bit keys at most
            64, so that each of its two runs has the same cuts.
        ring_tile: tokens of the ring per iteration.
        max_rows: most query rows (query heads of a kv head times new tokens) per program.
        min_rows: fewest rows of a matrix product.
        programs_per_multiprocessor: what the split count aims at.
        min_tiles_per_split: a split has at least this many tiles.

    """

    num_warps: int = 2
    num_stages: int = 3
    tile: int = 64
    ring_tile: int = 16
    max_rows: int = 16
    min_rows: int = 8
    programs_per_multiprocessor: int = 4
    min_tiles_per_split: int = 4


def decode_tuning(fmt: Format, dtype: torch.dtype, rows: int, arch: str) -> DecodeTuning:
    """Return the decode kernel's tuning.

    Args:
        fmt: format of the pages.
        dtype: of the queries.
        rows: query rows per kv head and request: heads that share it times new tokens.
        arch: of the device.

    Raises:
        ValueError: ``KVQ_TUNING`` names a tile that reads wrong scales.

    """
    tile = min(64, fmt.key_group_size)
    if arch.startswith("gfx"):  # below 16 rows there is no matrix instruction
        tuned = DecodeTuning(num_warps=2, num_stages=2, tile=tile, min_rows=16)
    elif fmt.head_size > 128 or dtype == torch.float32:  # one warp spills, and so do 16 rows
        tuned = DecodeTuning(tile=tile, max_rows=8)
    elif rows <= 8:  # fewest instructions: a warp on its own exchanges nothing with others
        tuned = DecodeTuning(num_warps=1, tile=tile, programs_per_multiprocessor=8)
    else:
        tuned = DecodeTuning(tile=tile)
    tuned = _overridden(tuned, "decode")
    if fmt.key_group_size % tuned.tile or (fmt.num_cuts and tuned.tile > 2 * CUT_TOKENS):
        raise ValueError(
            f"KVQ_TUNING cuts decode into tiles of {tuned.tile} tokens, which do not suit "
            f"{fmt.name} in groups of {fmt.key_group_size}: use a divisor, with kvq-int4 up to "
            f"{2 * CUT_TOKENS}."
        )
    return tuned


@dataclass(frozen=True)
class PrefillTuning:
    """How the prefill kernel is cut.

    Attributes:
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        rows: query rows per program: tokens times heads.
        sealed_tile: sealed tokens per iteration, a power of two up to the key group size; with
            4-bit keys at most 64, so that each of its two runs has the same cuts.
        open_tile: tokens of the open unit per iteration.
        share: whether one warp dequantises for all; see ``prefill._once_per_program``.
        rotation_width: channels of values that are rotated back in one matrix product.

    """

    num_warps: int = 8
    num_stages: int = 2
    rows: int = 128
    sealed_tile: int = 64
    open_tile: int = 32
    share: bool = False
    rotation_width: int = 64


_OPERANDS_IN_REGISTERS = ("sm_80", "sm_86", "sm_89", "sm_120")
"""Where matrix products have no operand in shared memory."""


def prefill_tuning(fmt: Format, arch: str) -> PrefillTuning:
    """Return the prefill kernel's tuning: the most query rows that leave no register spilled.

    Raises:
        ValueError: ``KVQ_TUNING`` names a tile that Triton cannot compile, or of wrong scales.

    """
    wide = fmt.head_size > 128  # a warp's sums alone are half of its registers, or all on AMD
    if arch in _OPERANDS_IN_REGISTERS:
        tuned = PrefillTuning(share=True, rotation_width=32)
        if wide and fmt.key_group_size > 32:
            # Fewer rows than tokens: Triton gives warps some channels each, not some rows each.
            tuned = dataclasses.replace(tuned, rows=32)
        elif wide:
            tuned = dataclasses.replace(tuned, rows=16, num_warps=4)
        elif fmt.head_size > 64:
            tuned = dataclasses.replace(tuned, sealed_tile=32)
    elif arch.startswith("gfx"):
        tuned = PrefillTuning(sealed_tile=32)
        if wide or (fmt.head_size > 64 and fmt.key_bits == 8):
            tuned = dataclasses.replace(tuned, rows=64, num_warps=4)
    elif wide and fmt.key_group_size < 64:
        tuned = PrefillTuning(rows=16, num_warps=4)  # see _check_prefill
    elif wide and arch != "sm_90":
        tuned = PrefillTuning(rows=64)
    else:
        # With rotated values of wide heads, sm_90 still spills 48 bytes, once, between the loops.
        tuned = PrefillTuning(rotation_width=32 if wide else 64)
    tile = min(tuned.sealed_tile, fmt.key_group_size)
    tuned = _overridden(dataclasses.replace(tuned, sealed_tile=tile), "prefill")
    _check_prefill(tuned, fmt, arch)
    return tuned


def _check_prefill(tuned: PrefillTuning, fmt: Format, arch: str) -> None:
    """Refuse runs of tokens with more than one cut, and what kills the process.

    Triton 3.9 ends in "Illegal shared layout" where operands of matrix products lie in shared
    memory, that is from 64 rows up on sm_90 and later but sm_120, if tiles of 4-bit values are
    narrow and their heads wide.
    """
    if fmt.num_cuts and tuned.sealed_tile > 2 * CUT_TOKENS:
        raise ValueError(
            f"KVQ_TUNING cuts prefill into a sealed_tile of {tuned.sealed_tile} tokens: {fmt.name} "
            f"takes up to {2 * CUT_TOKENS}."
        )
    in_shared_memory = (
        arch.startswith("sm_") and arch not in _OPERANDS_IN_REGISTERS and tuned.rows >= 64
    )
    narrow = fmt.value_bits == 4 and fmt.head_size > 128 and tuned.sealed_tile < 64
    if in_shared_memory and narrow:
        raise ValueError(
            f"KVQ_TUNING cuts prefill into {tuned.rows} rows and a sealed_tile of "
            f"{tuned.sealed_tile}, which Triton cannot compile for head size {fmt.head_size} of "
            f"{fmt.name} on {arch}: use fewer than 64 rows, or a tile of 64."
        )


@dataclass(frozen=True)
class SealTuning:
    """How sealing a blob is cut.

    Attributes:
        num_warps: warps per program.
        key_tile: bytes of a token's key codes per iteration.
        value_tile: bytes of a channel's value codes per iteration, at least 16.

    """

    num_warps: int
    key_tile: int
    value_tile: int


def seal_tuning(fmt: Format, arch: str) -> SealTuning:
    """Return tiles that leave a thread about 32 fp32 numbers at a time, whatever the sizes.

    Half as many keys where values have 8 bits as well, or sm_100 and sm_120 spill 16 bytes; and
    where keys have 4 bits, or sm_80 does: every part of a group has a scale of its own. AMD's warps
    have 64 threads, and 8 of them spill.
    """
    budget = 4096 if fmt.value_bits == 4 else 2048
    width = fmt.head_size * fmt.key_bits // 8
    many_warps = fmt.head_size > 128 or (fmt.key_bits == 4 and not arch.startswith("gfx"))
    tuned = SealTuning(
        num_warps=8 if many_warps else 4,
        key_tile=min(1 << (width - 1).bit_length(), budget // fmt.key_group_size),
        value_tile=min(fmt.key_group_size * fmt.value_bits // 8, 32),
    )
    return _overridden(tuned, "seal")


def _overridden(tuned: Any, kernel: str) -> Any:
    """Return `tuned` with the fields that ``KVQ_TUNING`` names for `kernel`."""
    overrides = OVERRIDES.get(kernel)
    return dataclasses.replace(tuned, **overrides) if overrides else tuned
