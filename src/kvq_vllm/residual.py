"""The residual ring: a second KV cache group in vLLM's own pool.

Each attention layer has a companion layer whose cache holds the request's newest tokens
unquantised. vLLM allocates, frees, preempts and accounts for it as for any other group.

A ring page must be as large as a quantised page, so that both groups share the pool without
waste: a ring block holds as many tokens as fit, and a request owns as many blocks as it needs.
Where layers differ in kv heads or head size, so do their pages; all rings then have the largest
one's size, because vLLM's planner can pad and scale the pages of attention layers to each other,
but not those of rings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvq_kernels.formats import Format, ring_block_size
from kvq_vllm import connectors

logger = init_logger(f"vllm.{__name__}")

LAYER_SUFFIX = ".kvq_residual"


@dataclass(frozen=True, kw_only=True)
class ResidualSpec(CircularBufferSpec):
    """A ring of `ring_blocks` blocks of `block_size` tokens per request.

    The token at position p lies at slot ``p % (ring_blocks * block_size)``. Not prefix-cacheable:
    a prefix hit ends on a page boundary, where no query reads the ring.
    """

    ring_blocks: int

    @property
    def capacity(self) -> int:
        """Tokens that the ring of one request holds."""
        return self.ring_blocks * self.block_size

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        max_blocks = cdiv(vllm_config.model_config.max_model_len, self.block_size)
        return min(self.ring_blocks, max_blocks) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        if vllm_config.use_v2_model_runner:
            return self.ring_blocks
        # Model runner V1 computes a slot mapping for every group, also for those that do not
        # use one, and indexes the row with position // block_size: it must be wide enough.
        return max(self.ring_blocks, cdiv(max_len, self.block_size))


class ResidualManager(CircularBufferManager):
    """Gives each request up to `ring_blocks` blocks, as its length needs them."""

    def _missing_blocks(self, request_id: str, num_tokens: int) -> int:
        wanted = min(self.kv_cache_spec.ring_blocks, cdiv(num_tokens, self.block_size))
        return max(0, wanted - len(self.req_to_blocks.get(request_id, ())))

    def _claim(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        missing = self._missing_blocks(request_id, num_tokens)
        blocks: list[KVCacheBlock] = self.block_pool.get_new_blocks(missing) if missing else []
        self.req_to_blocks[request_id].extend(blocks)
        return blocks

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        return self._missing_blocks(request_id, num_tokens)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        return self._claim(request_id, num_tokens)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        self._claim(request_id, num_local_computed_tokens + num_external_computed_tokens)


# The built-in specs register on first use and only into an empty registry: let them go first.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(ResidualSpec, ResidualManager, ResidualSpec)
connectors.bound_hits()


def residual_spec(
    pages: AttentionSpec,
    fmt: Format,
    dtype: torch.dtype,
    unconfirmed_tokens: int,
    page_size_bytes: int,
) -> ResidualSpec:
    """Return the ring that belongs to a layer's pages.

    Args:
        pages: the spec of the quantised pages.
        fmt: their format.
        dtype: of the model's keys and values.
        unconfirmed_tokens: written in one step beyond the last confirmed one.
        page_size_bytes: of the ring, at least that of `pages`.

    """
    token_bytes = 2 * fmt.head_size * get_dtype_size(dtype)
    block_size = ring_block_size(
        pages.block_size, page_size_bytes, token_bytes * pages.num_kv_heads
    )
    return ResidualSpec(
        block_size=block_size,
        ring_blocks=cdiv(fmt.unit_size + unconfirmed_tokens, block_size),
        num_kv_heads=pages.num_kv_heads,
        head_size=fmt.head_size,
        # Dtype and mode as the pages': vLLM zeroes new blocks when precisions are mixed.
        dtype=pages.dtype,
        kv_quant_mode=pages.kv_quant_mode,
        state_content_bytes=token_bytes,
        page_size_padded=page_size_bytes,
        dcp_sharded=False,
    )


def _unconfirmed_tokens(vllm_config: VllmConfig) -> int:
    """Return how many tokens a step writes beyond the last confirmed one.

    The target writes its drafts. A draft model writes as many and one more: the token that the
    target has just sampled, with room for it also where all drafts were rejected.
    """
    drafts: int = vllm_config.num_speculative_tokens
    return drafts + 1 if drafts else 0


class ResidualLayer(AttentionLayerBase):
    """Companion of one attention layer, known to vLLM as ``<layer name>.kvq_residual``.

    Attributes:
        kv_cache: uint8 ``[num_blocks, num_kv_heads, block_size, bytes per token]``.
        spec: set once vLLM asked for it.

    """

    def __init__(self, owner: Any, fmt: Format, backend: type[AttentionBackend]) -> None:
        """Make the companion of `owner`, an ``Attention`` layer; `backend` reads the ring."""
        self.owner = owner
        self.fmt = fmt
        self.backend = backend
        self.kv_cache = torch.tensor([])
        self.spec: ResidualSpec | None = None

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> ResidualSpec:
        pages = self._pages(vllm_config)
        companions = [
            layer
            for layer in vllm_config.compilation_config.static_forward_context.values()
            if isinstance(layer, ResidualLayer)
        ]
        self.spec = residual_spec(
            pages,
            self.fmt,
            self.owner.dtype,
            _unconfirmed_tokens(vllm_config),
            max(layer._pages(vllm_config).page_size_bytes for layer in companions),
        )
        logger.info_once(
            "kvq: %d bytes per token and head (%s), pages of %d tokens; newest tokens "
            "unquantised in a ring of %d blocks of %d tokens per request.",
            self.fmt.bytes_per_token,
            self.fmt.name,
            pages.block_size,
            self.spec.ring_blocks,
            self.spec.block_size,
        )
        return self.spec

    def _pages(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Return the spec of the owner's pages."""
        spec = self.owner.get_kv_cache_spec(vllm_config)
        return self.owner.get_attn_backend().customize_spec(spec)

    @property
    def ring(self) -> torch.Tensor:
        """The ring in the model's dtype, ``[num_blocks, num_kv_heads, block_size, 2 * D]``."""
        return self.kv_cache.view(self.owner.dtype)
