"""The packed formats: what one unit of one kv head looks like in memory.

A sequence is sealed in *units* of ``unit_size`` tokens. The packed bytes of one unit of one
kv head are a *record*; a KV cache page is ``block_size / unit_size`` records per kv head.

Record, in bytes (D = head size, U = unit size, g = key group size, bk/bv = key/value bits)::

    blob 0 | blob 1 | ... | blob U/g - 1 | anchor | padding

    blob     K codes   g * D * bk / 8   8 bit: [g][D]
                                        4 bit: [g][D/2], byte c = code[c] | code[c + D/2] << 4
             V codes   D * g * bv / 8   8 bit: [D][g] (transposed)
                                        4 bit: [D][g/2], byte t = code[t] | code[t + g/2] << 4
             K meta    D * 4            per channel: fp16 scale, fp16 zero
             K cuts    g / 32 * D       [g/32][D], byte = low | high << 4; 4-bit keys only
             V meta    g * 4            per token:   fp16 scale, fp16 zero
    anchor   codes     D                8-bit codes of the key of the sequence's first token
             meta      4                fp16 scale, fp16 zero
             flag      1                1 in unit 0 of a sequence, else 0
    padding  up to a multiple of U bytes, because vLLM counts cache bytes per token

Every section starts at a multiple of 16 bytes. A value is ``code * scale + zero``; of 4-bit keys
the cuts narrow scale and zero for every 32 tokens, see :func:`kvq_kernels.reference.cut_meta`.
Formats with 8-bit keys have no anchor and no cuts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # sizes are needed where PyTorch is not installed: `kvq plan`
    import torch

DTYPE_PREFIX = "kvq-"
"""Prefix of our ``--kv-cache-dtype`` names."""

MAX_HEAD_SIZE = 256
HEAD_SIZE_MULTIPLE = 16
UNIT_SIZES = (64, 128, 256)
DEFAULT_UNIT_SIZE: Final = 128
MIN_KEY_GROUP_SIZE = 32
SECTION_ALIGNMENT = 16
_META_BYTES = 4  # fp16 scale, fp16 zero
CUT_TOKENS = 32
"""Tokens of a key group that share one cut of its range."""
CUT_STEPS = 32
"""A cut of 1 takes away this part of the range of its key group."""
MAX_CUT = 15
"""At either end of the range; 4 bits."""


@dataclass(frozen=True)
class Scheme:
    """What a format name stands for, independent of head size and tuning.

    Attributes:
        key_bits: 4 or 8; keys have one scale and zero per channel per group of tokens, with 4 bits
            narrowed for every :data:`CUT_TOKENS` of them.
        value_bits: 4 or 8; values have one scale and zero per token.
        anchor: whether the first token's key is kept apart, in 8 bits.
        rotate_values: whether values are stored rotated by :func:`hadamard`.

    """

    key_bits: int
    value_bits: int
    anchor: bool
    rotate_values: bool


SCHEMES: Mapping[str, Scheme] = {
    "kvq-int8": Scheme(8, 8, anchor=False, rotate_values=False),
    "kvq-k8v4": Scheme(8, 4, anchor=False, rotate_values=True),
    "kvq-int4": Scheme(4, 4, anchor=True, rotate_values=True),
}
"""Format name, as in ``--kv-cache-dtype``, to scheme."""

DEBUG_FORMAT = "kvq-debug-int4-per-token"
"""Known to be bad, see :mod:`kvq_kernels.debug`; there is no such format without the variable."""
if os.environ.get("KVQ_DEBUG_FORMATS") == "1":
    SCHEMES = {**SCHEMES, DEBUG_FORMAT: SCHEMES["kvq-int8"]}


def find_scheme(name: str) -> Scheme:
    """Return the scheme called `name`.

    Raises:
        ValueError: there is none; the message is one sentence that lists the names.

    """
    if name not in SCHEMES:
        raise ValueError(f"Unknown format {name!r}: choose one of {', '.join(SCHEMES)}.")
    return SCHEMES[name]


@dataclass(frozen=True)
class Format:
    """A scheme with its sizes fixed: the layout of every byte of a record.

    Attributes:
        name: a key of :data:`SCHEMES`.
        head_size: D, a multiple of 16 up to 256.
        unit_size: U, tokens sealed together: 64, 128 or 256.
        key_group_size: g, tokens per key scale; a power of two from 32 to U.

    Raises:
        ValueError: on construction, when a size is not supported; the message is one sentence
            that names the value and what is allowed.

    """

    name: str
    head_size: int
    unit_size: int
    key_group_size: int

    def __post_init__(self) -> None:
        find_scheme(self.name)
        if not supports_head_size(self.head_size):
            raise ValueError(
                f"{self.name} does not support head size {self.head_size}: it must be a multiple "
                f"of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}."
            )
        if self.unit_size not in UNIT_SIZES:
            raise ValueError(
                f"unit_size {self.unit_size} is not supported: choose one of "
                f"{', '.join(map(str, UNIT_SIZES))}."
            )
        g = self.key_group_size
        if not MIN_KEY_GROUP_SIZE <= g <= self.unit_size or g & (g - 1):
            raise ValueError(
                f"key_group_size {g} is not supported: it must be a power of two from "
                f"{MIN_KEY_GROUP_SIZE} to unit_size ({self.unit_size})."
            )

    @classmethod
    def create(
        cls,
        name: str,
        head_size: int,
        unit_size: int = DEFAULT_UNIT_SIZE,
        key_group_size: int | None = None,
    ) -> Format:
        """Return the format `name` for `head_size`, by default with one key group per unit.

        Args:
            name: a key of :data:`SCHEMES`.
            head_size: channels per head.
            unit_size: tokens per unit.
            key_group_size: tokens per key scale; None is the whole unit.

        Raises:
            ValueError: as :class:`Format`.

        """
        return cls(name, head_size, unit_size, key_group_size or unit_size)

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.name]

    @property
    def key_bits(self) -> int:
        return self.scheme.key_bits

    @property
    def value_bits(self) -> int:
        return self.scheme.value_bits

    @property
    def anchor(self) -> bool:
        return self.scheme.anchor

    @property
    def rotate_values(self) -> bool:
        return self.scheme.rotate_values

    # --- one blob: `key_group_size` tokens -------------------------------------------------

    @property
    def num_blobs(self) -> int:
        return self.unit_size // self.key_group_size

    @property
    def key_codes_bytes(self) -> int:
        return self.key_group_size * self.head_size * self.key_bits // 8

    @property
    def value_codes_bytes(self) -> int:
        return self.head_size * self.key_group_size * self.value_bits // 8

    @property
    def key_meta_bytes(self) -> int:
        return self.head_size * _META_BYTES

    @property
    def num_cuts(self) -> int:
        """Parts of a key group whose range is cut, per channel; 0 where ranges are not."""
        return self.key_group_size // CUT_TOKENS if self.key_bits == 4 else 0

    @property
    def key_cuts_bytes(self) -> int:
        return self.num_cuts * self.head_size

    @property
    def value_meta_bytes(self) -> int:
        return self.key_group_size * _META_BYTES

    @property
    def key_codes_offset(self) -> int:
        """Offset in the blob, as the other four."""
        return 0

    @property
    def value_codes_offset(self) -> int:
        return self.key_codes_offset + self.key_codes_bytes

    @property
    def key_meta_offset(self) -> int:
        return self.value_codes_offset + self.value_codes_bytes

    @property
    def key_cuts_offset(self) -> int:
        return self.key_meta_offset + self.key_meta_bytes

    @property
    def value_meta_offset(self) -> int:
        return self.key_cuts_offset + self.key_cuts_bytes

    @property
    def blob_bytes(self) -> int:
        return self.value_meta_offset + self.value_meta_bytes

    # --- the rest of the record ------------------------------------------------------------

    @property
    def anchor_codes_offset(self) -> int:
        """Offset in the record, as the next two. Only formats with an anchor have them."""
        return self.num_blobs * self.blob_bytes

    @property
    def anchor_meta_offset(self) -> int:
        return self.anchor_codes_offset + self.head_size

    @property
    def anchor_flag_offset(self) -> int:
        return self.anchor_meta_offset + _META_BYTES

    @property
    def content_bytes(self) -> int:
        """Bytes of a record without its padding."""
        return self.anchor_flag_offset + 1 if self.anchor else self.anchor_codes_offset

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache per token and kv head, keys and values together."""
        return -(-self.content_bytes // self.unit_size)

    @property
    def record_bytes(self) -> int:
        return self.bytes_per_token * self.unit_size


def supports_head_size(head_size: int) -> bool:
    return 0 < head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_MULTIPLE == 0


def ring_block_size(block_size: int, page_bytes: int, token_bytes: int) -> int:
    """Return how many tokens of the residual ring share one page.

    The largest power of two that divides `block_size` and fits the page, so that pages of
    sealed units and pages of the ring can have one size and share a pool.

    Args:
        block_size: tokens in a page of sealed units.
        page_bytes: size of a page.
        token_bytes: unquantised key and value of one token, all kv heads.

    """
    tokens = 1
    while block_size % (2 * tokens) == 0 and 2 * tokens * token_bytes <= page_bytes:
        tokens *= 2
    return tokens


@lru_cache(maxsize=64)
def hadamard(head_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the orthonormal rotation applied to values, fp32 ``[head_size, head_size]``.

    Sylvester's Hadamard matrix, symmetric and its own inverse; block-diagonal over the powers
    of two that sum to `head_size`, largest first, where that is no power of two
    (96 = 64 + 32).
    """
    import torch

    blocks = []
    rest = head_size
    while rest:
        size = 1 << (rest.bit_length() - 1)
        # Whatever the default dtype is: vLLM loads models with theirs as the default.
        block = torch.ones(1, 1, dtype=torch.float32)
        while block.shape[0] < size:
            block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)], 0)
        blocks.append(block * size**-0.5)
        rest -= size
    return torch.block_diag(*blocks).to(device)
