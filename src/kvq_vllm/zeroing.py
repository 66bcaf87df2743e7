"""Zeroing of new blocks on vLLM's CPU runner.

Where unquantised layers share the pool with quantised ones (skipped layers, a drafter at `auto`),
a block comes with bytes that were records, which as floats may be NaN, and vLLM's CPU attention
multiplies also what it masks. So vLLM zeroes new blocks of such caches. Its CPU runner, up to 0.33
at least, does so for the first of the layers that lie at the same address, whatever page the others
have there; on GPUs it takes the widest. Here the unquantised ones, which are wider, are zeroed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvq_vllm.wrapping import wrap_once


def take_over() -> None:
    """Replace the method of the CPU runner, once per process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    wrap_once(CPUModelRunner, "_zero_block_ids", _unquantised_too)


def _unquantised_too(zero: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: Any, block_ids: list[int]) -> None:
        zero(self, block_ids)
        for layer in self.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.numel() and cache.is_floating_point():
                cache[block_ids] = 0

    return wrapped
