"""Which kernels run on which device."""

from __future__ import annotations

import os
from typing import Protocol, cast

import torch

from kvq_kernels import cpu, reference
from kvq_kernels.interface import AttentionParams, Batch, LayerCache

ENV_VAR = "KVQ_KERNELS"
"""Debugging: forces the kernels, whatever the device."""


class Kernels(Protocol):
    """A module with the operations of the cache; :mod:`kvq_kernels.reference` documents them."""

    __name__: str

    def seal(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch
    ) -> None: ...

    def write_ring(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch
    ) -> None: ...

    def store(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch
    ) -> None: ...

    def decode(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: Batch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None: ...

    def prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        batch: Batch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None: ...


_KERNELS = {"reference": reference, "cpu": cpu}


def select_kernels(device: torch.device) -> Kernels:
    """Return the best kernels for `device`, or those that ``KVQ_KERNELS`` names.

    Raises:
        ValueError: ``KVQ_KERNELS`` names none, or some that cannot run here.

    """
    name = os.environ.get(ENV_VAR)
    if name is None:
        name = "reference" if fallback_reason(device) else "cpu"
    elif name not in _KERNELS:
        raise ValueError(f"{ENV_VAR}={name} is unknown: choose one of {', '.join(_KERNELS)}.")
    elif name == "cpu" and (reason := fallback_reason(device)):
        raise ValueError(f"{ENV_VAR}=cpu cannot be used: {reason}")
    return cast(Kernels, _KERNELS[name])


def fallback_reason(device: torch.device) -> str | None:
    """Return why `device` has only the reference kernels, or None if it has fast ones."""
    if device.type == "cpu":
        return cpu.why_unavailable()
    return f"there are no kernels for {device.type} devices yet."
