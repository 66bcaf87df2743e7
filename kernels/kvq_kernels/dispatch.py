"""Which kernels run on which device."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Protocol, cast

import torch

from kvq_kernels import cpu
from kvq_kernels.formats import Format
from kvq_kernels.interface import AttentionParams, Batch, LayerCache

ENV_VAR = "KVQ_KERNELS"
"""Debugging: forces the kernels, whatever the device."""


class Kernels(Protocol):
    """A module with the operations of the cache; :mod:`kvq_kernels.reference` documents them."""

    __name__: str

    def prepare(self, fmt: Format, device: torch.device) -> tuple[torch.Tensor, ...]: ...

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

    def workspace_bytes(
        self,
        fmt: Format,
        max_num_requests: int,
        max_query_len: int,
        num_heads: int,
        num_kv_heads: int,
        max_model_len: int,
        device: torch.device,
    ) -> int: ...


_NAMES = ("reference", "cpu", "triton")


def kernel_names(device: torch.device) -> tuple[str, str]:
    """Return the values of ``KVQ_KERNELS`` that are meant for `device`, the best one last."""
    return ("reference", _best(device))


def select_kernels(device: torch.device) -> Kernels:
    """Return the best kernels for `device`, or those that ``KVQ_KERNELS`` names.

    Raises:
        ValueError: ``KVQ_KERNELS`` names none, or some that cannot run here.

    """
    name = os.environ.get(ENV_VAR)
    if name is None:
        name = "reference" if fallback_reason(device) else _best(device)
    elif name not in _NAMES:
        raise ValueError(f"{ENV_VAR}={name} is unknown: choose one of {', '.join(_NAMES)}.")
    elif reason := why_unavailable(name, device):
        raise ValueError(f"{ENV_VAR}={name} cannot be used: {reason}")
    return cast(Kernels, importlib.import_module(f"kvq_kernels.{name}"))


def fallback_reason(device: torch.device) -> str | None:
    """Return why `device` has only the reference kernels, or None if it has fast ones."""
    return why_unavailable(_best(device), device)


def why_unavailable(name: str, device: torch.device) -> str | None:
    """Return why the kernels `name` cannot run on `device`, or None if they can."""
    if name == "reference":
        return None
    if name == "cpu":
        if device.type != "cpu":
            return f"they are for CPUs, not for {device.type} devices."
        return cpu.why_unavailable()
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with PyTorch for GPUs, or as pip install triton."
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton does not run on {device.type} devices, except with TRITON_INTERPRET=1."
    return None


def _best(device: torch.device) -> str:
    # PyTorch calls AMD's GPUs "cuda" as well.
    return "cpu" if device.type == "cpu" else "triton"
