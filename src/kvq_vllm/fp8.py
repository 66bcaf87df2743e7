"""vLLM's attention backend for the fp8 formats: pages only, scales from vLLM's layer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec

from kvq_kernels.fp8 import (
    BLOCK_SIZE_MULTIPLE,
    FP8_DTYPES,
    Fp8Cache,
    Fp8Kernels,
    reference,
    select_kernels,
)
from kvq_kernels.reference import attention
from kvq_vllm import scales
from kvq_vllm.backend import KVQBackend, KVQMetadata, LayerImpl, refuse_layer, say_which_kernels
from kvq_vllm.config import KVQConfig

scales.take_over()


class Fp8Backend(KVQBackend):
    """What vLLM asks about layers with an fp8 dtype of ours."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FP8_DTYPES)

    @staticmethod
    def get_impl_cls() -> type[Fp8Impl]:  # type: ignore[override]
        return Fp8Impl

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(BLOCK_SIZE_MULTIPLE)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Say that keys and values of a token lie side by side.

        vLLM also asks for the size of unquantised layers here; those have a float dtype.
        """
        if spec.dtype != torch.uint8 or spec.state_content_bytes is not None:
            return spec
        return dataclasses.replace(spec, state_content_bytes=2 * spec.head_size)


def check_layer(selector_config: Any, device_capability: Any) -> None:
    """Check one layer as vLLM is about to construct it, with vLLM's own words.

    Raises:
        KVQConfigError: when an fp8 cache of ours cannot serve the layer.

    """
    config = KVQConfig.parse(get_current_vllm_config().additional_config)
    config.fp8_format(selector_config.kv_cache_dtype, selector_config.head_size)
    refuse_layer(Fp8Backend, selector_config, device_capability)


class Fp8Impl(LayerImpl):
    """Runs one attention layer on an fp8 cache.

    Attributes:
        frozen_scales: key and value scales that no longer follow the checkpoint, each ``[1]`` or
            ``[num_kv_heads]`` on the host, or None.

    """

    logger = init_logger(f"vllm.{__name__}")

    def set_up(self) -> None:
        self.fmt = self.config.fp8_format(self.kv_cache_dtype, self.head_size)
        self.frozen_scales: tuple[torch.Tensor, torch.Tensor] | None = None
        self._largest_seen: torch.Tensor | None = None  # while measuring
        self.kernels: Fp8Kernels = reference  # until the weights are loaded
        self.device = torch.device("cpu")
        if self.config.scales == "warmup":
            scales.measure_at_start(self.vllm_config)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Choose the kernels. The scales follow: :func:`kvq_vllm.scales.settle`."""
        _, layer = self.find_layer()
        self.device = layer._k_scale.device
        self.kernels = select_kernels(self.device)
        say_which_kernels(self.kernels, self.kernels is reference, self.device)
        self.complete_params(layer, self.device)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KVQMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new tokens, then attend.

        Args:
            layer: the attention layer.
            query: ``[num_tokens, num_heads, head_size]``; rows may be padding.
            key: ``[num_tokens, num_kv_heads, head_size]``; None if the cache is another layer's.
            value: as `key`.
            kv_cache: uint8 ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
            attn_metadata: None in a memory profiling run and while measuring scales.
            output: written, shape of `query`.
            output_scale: not supported.
            output_block_scale: not supported.

        Returns:
            `output`.

        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvq caches do not support fused output quantisation")
        if self._largest_seen is not None:
            key, value = self.exchange_tokens(key, value, needed=True)
            return self._measure(query, key, value, output)
        if attn_metadata is None:
            return output.fill_(0)
        scaled = layer if self.owner is None else self.owner
        cache = Fp8Cache(
            self.fmt, kv_cache, attn_metadata.block_table, scaled._k_scale, scaled._v_scale
        )
        num_decodes = attn_metadata.num_decodes
        if self.owner is None:
            self.kernels.write(key, value, cache, attn_metadata.requests)
        if attn_metadata.decodes is not None:
            part = cache.requests(0, num_decodes)
            rows = slice(attn_metadata.num_decode_tokens)
            self.kernels.decode(query[rows], part, attn_metadata.decodes, self.params, output[rows])
        if attn_metadata.prefills is not None:
            part = cache.requests(num_decodes, None)
            self.kernels.prefill(query, part, attn_metadata.prefills, self.params, output)
        return output

    def start_measuring(self) -> None:
        """Record the largest keys and values, rather than using the cache, until the finish."""
        self._largest_seen = torch.zeros(2, self.num_kv_heads, device=self.device)

    def finish_measuring(self) -> torch.Tensor:
        """Return the largest magnitudes of keys and values since the start, ``[2, heads]``."""
        assert self._largest_seen is not None
        seen, self._largest_seen = self._largest_seen, None
        return seen

    def _measure(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """Attend to one whole sequence, unquantised, and note its largest elements."""
        assert self._largest_seen is not None
        for seen, x in zip(self._largest_seen, (key, value), strict=True):
            finite = x.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            torch.maximum(seen, finite.abs().amax((0, 2)), out=seen)
        result = attention(query, key, value, self.params, query_start=0, key_start=0)
        return output.copy_(result)
