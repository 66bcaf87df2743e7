"""A format that is known to be bad, to prove that measurements notice.

With the environment variable ``KVQ_DEBUG_FORMATS=1``, :mod:`kvq_kernels.formats` has one more
format, ``kvq-debug-int4-per-token``: keys and values are rounded to 4 bits with one scale per
token, without anchor or rotation. Its records are those of an 8-bit format, so that any kernel
reads them: it has the accuracy of a naive 4-bit cache, not the size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvq_kernels import reference
from kvq_kernels.formats import DEBUG_FORMAT
from kvq_kernels.interface import AttentionParams, Batch, LayerCache

if TYPE_CHECKING:
    from kvq_kernels.dispatch import Kernels


class PerToken:
    """Kernels that round every sealed token to 4 bits; the rest is left to `kernels`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.__name__ = f"{kernels.__name__} ({DEBUG_FORMAT})"

    def seal(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
        """Seal as :func:`reference.seal`, then round what was sealed."""
        self.kernels.seal(key, value, cache, batch)
        fmt, pages = cache.fmt, reference._records(cache)
        for request, _, start, end in reference._requests(batch):
            units = torch.arange(start // fmt.unit_size, end // fmt.unit_size, device=key.device)
            blocks, slots = reference._unit_slots(cache, request, units)
            k, v = reference.unpack_records(pages[blocks, :, slots], fmt)
            pages[blocks, :, slots] = reference.pack_records(_round(k), _round(v), fmt)

    def write_ring(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch
    ) -> None:
        self.kernels.write_ring(key, value, cache, batch)

    def decode(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: Batch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        self.kernels.decode(query, cache, batch, params, out)

    def prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        batch: Batch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        self.kernels.prefill(query, key, value, cache, batch, params, out)


def _round(x: torch.Tensor) -> torch.Tensor:
    """Round to 4 bits with one scale and zero along the last dimension."""
    codes, meta = reference._quantise(x, torch.ones_like(x, dtype=torch.bool), bits=4, dim=-1)
    return reference._dequantise(codes, meta[..., None, :])
