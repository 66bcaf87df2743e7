"""A format that is known to be bad, to prove that measurements notice.

With the environment variable ``KVQ_DEBUG_FORMATS=1``, :mod:`kvq_kernels.formats` has one more
format, ``kvq-debug-int4-per-token``: every key and value is rounded to 4 bits as it arrives, with
one scale per token and head; there is no full-precision window, anchor or rotation. What is rounded
is then stored as an 8-bit format, so that any kernel reads it: it has the accuracy of a naive 4-bit
cache, not the size.
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
    """Kernels that see only rounded keys and values; the rest is left to `kernels`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.decode = kernels.decode  # tokens come from the cache, already rounded
        self.prepare = kernels.prepare
        self.workspace_bytes = kernels.workspace_bytes
        self.__name__ = f"{kernels.__name__} ({DEBUG_FORMAT})"

    def seal(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
        self.kernels.seal(_round(key), _round(value), cache, batch)

    def write_ring(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch
    ) -> None:
        self.kernels.write_ring(_round(key), _round(value), cache, batch)

    def store(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch
    ) -> None:
        self.kernels.store(_round(key), _round(value), cache, batch)

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
        self.kernels.prefill(query, _round(key), _round(value), cache, batch, params, out)


def _round(x: torch.Tensor) -> torch.Tensor:
    """Round to 4 bits with one scale and zero along the last dimension."""
    finite, in_range = reference._finite(x)
    codes, meta = reference._quantise(finite, in_range, bits=4, dim=-1)
    return reference._dequantise(codes, meta[..., None, :]).to(x.dtype)
