"""The fp8 formats: one byte per element, static scales, no units, no ring.

A token is quantised when it is written, so it is read back from the pages from then on, even by
the queries of its own step. A page is, per kv head, one row of bytes per token::

    [block_size][2 * D]    D key codes, then D value codes

A value is ``code * scale``, where the code is an OCP fp8 number (E4M3 without infinities, or
E5M2) and the scale belongs to the kv head. The scales do not lie in the pages: they come with the
model or are measured once, and never change while a cache is in use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq_kernels.formats import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE, supports_head_size

if TYPE_CHECKING:  # names are needed where PyTorch is not installed: `kvq plan`
    import torch

FP8_DTYPES: Mapping[str, str] = {
    "kvq-fp8": "float8_e4m3fn",
    "kvq-fp8_e4m3": "float8_e4m3fn",
    "kvq-fp8_e5m2": "float8_e5m2",
}
"""Format name, as in ``--kv-cache-dtype``, to the name of PyTorch's type of a code."""

BLOCK_SIZE_MULTIPLE = 16
"""Tokens per block are a multiple of this, as everywhere in vLLM."""


@dataclass(frozen=True)
class Fp8Format:
    """A format name with its head size.

    Attributes:
        name: a key of :data:`FP8_DTYPES`.
        head_size: D, a multiple of 16 up to 256.

    Raises:
        ValueError: on construction, when one of them is not supported; the message is one
            sentence that names the value and what is allowed.

    """

    name: str
    head_size: int

    def __post_init__(self) -> None:
        if self.name not in FP8_DTYPES:
            raise ValueError(
                f"Unknown format {self.name!r}: choose one of {', '.join(FP8_DTYPES)}."
            )
        if not supports_head_size(self.head_size):
            raise ValueError(
                f"{self.name} does not support head size {self.head_size}: it must be a multiple "
                f"of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}."
            )

    @property
    def dtype(self) -> torch.dtype:
        """Type of a code: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``."""
        import torch

        dtype: torch.dtype = getattr(torch, FP8_DTYPES[self.name])
        return dtype

    @property
    def largest(self) -> float:
        """Largest finite code, 448 or 57344; what is beyond it saturates."""
        import torch

        return torch.finfo(self.dtype).max

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache per token and kv head, keys and values together."""
        return 2 * self.head_size


@dataclass(frozen=True)
class Fp8Cache:
    """The fp8 cache of one layer, with the block table of one batch.

    Attributes:
        fmt: format of the pages.
        pages: uint8 ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``. The last three
            dimensions are contiguous.
        block_table: int32 ``[num_requests, >= max_blocks]``, blocks of `pages` in the order of
            positions. Entries below a sliding window may point anywhere and are not read.
        key_scale: fp32 ``[num_kv_heads]``, positive and finite.
        value_scale: as `key_scale`.

    """

    fmt: Fp8Format
    pages: torch.Tensor
    block_table: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor

    def requests(self, start: int, end: int | None) -> Fp8Cache:
        """Return the same cache with the block tables of requests [start, end)."""
        if start == 0 and end == self.block_table.shape[0]:
            return self
        return dataclasses.replace(self, block_table=self.block_table[start:end])


def is_fp8(name: str | None) -> bool:
    """Whether a cache dtype is one of the fp8 formats, by name."""
    return name in FP8_DTYPES
