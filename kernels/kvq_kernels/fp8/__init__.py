"""fp8 caches with static scales per kv head: formats, oracle and kernels.

:mod:`.formats` has the bytes, :mod:`.reference` documents the operations.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from kvq_kernels.fp8.formats import BLOCK_SIZE_MULTIPLE, FP8_DTYPES, Fp8Cache, Fp8Format, is_fp8
from kvq_kernels.interface import AttentionParams, Batch

if TYPE_CHECKING:
    import torch

__all__ = [
    "BLOCK_SIZE_MULTIPLE",
    "FP8_DTYPES",
    "Fp8Cache",
    "Fp8Format",
    "Fp8Kernels",
    "is_fp8",
    "select_kernels",
]


class Fp8Kernels(Protocol):
    """A module with the operations of an fp8 cache, as :mod:`.reference`."""

    __name__: str

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: Fp8Cache, batch: Batch
    ) -> None: ...

    def decode(
        self,
        query: torch.Tensor,
        cache: Fp8Cache,
        batch: Batch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None: ...

    def prefill(
        self,
        query: torch.Tensor,
        cache: Fp8Cache,
        batch: Batch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None: ...


def select_kernels(device: torch.device) -> Fp8Kernels:
    """Return the fp8 counterpart of the kernels that the other formats have on `device`.

    Raises:
        ValueError: as :func:`kvq_kernels.dispatch.select_kernels`.

    """
    from kvq_kernels import dispatch  # imports PyTorch

    name = dispatch.select_kernels(device).__name__.rpartition(".")[2]
    return cast(Fp8Kernels, import_module(f"kvq_kernels.fp8.{name}"))
