"""KV connectors: which ones may move a kvq cache, and where a hit that they report must end.

A connector moves pages. Where a format keeps the newest tokens in a ring, those lie outside, so a
request may only go on from the end of a page: from there on no query reads the ring for what came
before, and what comes after is computed, which fills it. So nothing is lost, and the tail is
recomputed.

vLLM's own prefix cache always leaves the last token to compute and ends on a page. The offloading
connector may cover a prompt to its last token. Of such a prompt vLLM computes the last token again,
in the middle of a unit whose other tokens are in no ring: :func:`bound_hits` ends the hit a page
earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvq_kernels.fp8 import is_fp8
from kvq_vllm.config import is_kvq
from kvq_vllm.wrapping import wrap_once

OFFLOADING = "OffloadingConnector"
EXAMPLE = "ExampleConnector"
CPU_MEMORY = "CPUOffloadingSpec"
"""Where the offloading connector keeps pages unless it is told otherwise."""


def has_ring(cache_dtype: str | None) -> bool:
    """Whether a cache of this dtype keeps the newest tokens outside the pages."""
    return is_kvq(cache_dtype) and not is_fp8(cache_dtype)


def tested_with(cache_dtype: str) -> frozenset[str]:
    """Return the connectors that may move a cache of this kvq dtype.

    ``ExampleConnector``, like all connectors without vLLM's ``SupportsHMA``, can only move one KV
    cache group, and the ring is a second one.
    """
    return frozenset({OFFLOADING}) if has_ring(cache_dtype) else frozenset({OFFLOADING, EXAMPLE})


def chosen(vllm_config: Any) -> str | None:
    """Return the connector that vLLM is going to use.

    vLLM translates ``--kv-offloading-size`` into a connector only after the checks.
    """
    cache_config = vllm_config.cache_config
    if cache_config.kv_offloading_size is not None:
        from vllm import envs

        if cache_config.kv_offloading_backend != "native":
            return "LMCacheMPConnector"
        return "SimpleCPUOffloadConnector" if envs.VLLM_USE_SIMPLE_KV_OFFLOAD else OFFLOADING
    return getattr(vllm_config.kv_transfer_config, "kv_connector", None)


def bound_hits() -> None:
    """Make the offloading connector's hits in a cache with a ring end on a page, below the end.

    May be called any number of times.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    wrap_once(OffloadingConnector, "_max_loadable_tokens", _down_to_a_page)


def _down_to_a_page(original: Callable[..., int | None]) -> Callable[..., int | None]:
    def max_loadable_tokens(self: Any, request: Any, num_computed_tokens: int) -> int | None:
        bound = original(self, request, num_computed_tokens)
        cache_config = self._vllm_config.cache_config
        if not has_ring(cache_config.cache_dtype):
            return bound
        page = cache_config.block_size
        usable = (request.num_tokens - 1) // page * page - num_computed_tokens
        groups = self.connector_scheduler.config.kv_group_configs
        if usable > 0 and any(group.sliding_window_size_in_chunks for group in groups):
            usable += 1  # which the connector takes off again
        usable = max(0, usable)
        return usable if bound is None else min(bound, usable)

    return max_loadable_tokens
