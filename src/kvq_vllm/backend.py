"""vLLM's attention backend for kvq caches: specs, metadata, and the impl that runs the kernels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, LayerCache, debug, reference
from kvq_kernels.dispatch import ENV_VAR, Kernels, fallback_reason, select_kernels
from kvq_kernels.formats import DEBUG_FORMAT, HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE, UNIT_SIZES
from kvq_vllm import speculation, zeroing
from kvq_vllm.checks import OUR_BACKEND
from kvq_vllm.config import KVQConfig, KVQConfigError
from kvq_vllm.residual import LAYER_SUFFIX, ResidualLayer

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class KVQMetadata:
    """One step's batch, for one KV cache group.

    Attributes:
        requests: all requests.
        decodes: the first `num_decodes`, with few new tokens each, or None.
        prefills: the others, or None.
        num_decodes: where the two part.
        num_decode_tokens: the row where the prefills' tokens begin.
        block_table: int32 ``[num_requests, max_blocks]``, of this group.

    """

    requests: Batch
    decodes: Batch | None
    prefills: Batch | None
    num_decodes: int
    num_decode_tokens: int
    block_table: torch.Tensor


class KVQMetadataBuilder(AttentionMetadataBuilder[KVQMetadata]):
    """Builds the metadata of the pages' group and of the ring's group alike."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # One new token and the speculative ones count as decode; the runner sorts them first.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # CUDA graphs replay the addresses seen at capture: what build() computes must stay put.
        max_requests = vllm_config.scheduler_config.max_num_seqs
        self._seq_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Say which batches a full graph may hold: decodes of equal length.

        All lengths are read on the device, grids depend on shapes alone. The reference kernels
        read lengths on the host, so with them attention runs between piecewise graphs.
        """
        device = torch.device(current_platform.device_type)
        if select_kernels(device) is reference:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> KVQMetadata:
        common = common_attn_metadata
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold
        )
        starts, lens = common.query_start_loc, self._written_lens(common)
        return KVQMetadata(
            requests=Batch(starts, lens),
            decodes=Batch(starts[: num_decodes + 1], lens[:num_decodes]) if num_decodes else None,
            prefills=Batch(starts[num_decodes:], lens[num_decodes:]) if num_prefills else None,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            block_table=common.block_table_tensor,
        )

    def _written_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return the requests' lengths, 0 for those whose tokens must not be written.

        vLLM runs dummy batches (warm-up, graph capture, idle data-parallel ranks) over block
        tables that may still name blocks in use, and marks their tokens with slot -1.
        """
        num_requests, num_tokens = common.num_reqs, common.slot_mapping.shape[0]
        first_rows = common.query_start_loc[:num_requests].clamp(max=num_tokens - 1)
        written = common.slot_mapping[first_rows] >= 0
        lens = self._seq_lens[:num_requests]
        torch.mul(common.seq_lens[:num_requests], written, out=lens)
        return lens


class KVQBackend(AttentionBackend):
    """What vLLM asks about layers with a kvq dtype.

    Routing only knows the dtype, so it hands out this class. Once a layer's format is fixed,
    the layer gets a subclass that knows it: :func:`backend_for`.
    """

    fmt: ClassVar[Format | None] = None
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(SCHEMES)
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return OUR_BACKEND

    @staticmethod
    def get_impl_cls() -> type[KVQImpl]:
        return KVQImpl

    @staticmethod
    def get_builder_cls() -> type[KVQMetadataBuilder]:
        return KVQMetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[MultipleOf]:
        """Keep pages whole: they hold records of whole units."""
        return [MultipleOf(cls.fmt.unit_size if cls.fmt else min(UNIT_SIZES))]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE + 1, HEAD_SIZE_MULTIPLE))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts that keep a page contiguous; the first wastes nothing next to other pages."""
        return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Put the packed size in the spec.

        vLLM also asks for the size of unquantised layers here; those have a float dtype.
        """
        if cls.fmt is None or spec.dtype != torch.uint8 or spec.state_content_bytes is not None:
            return spec
        return dataclasses.replace(spec, state_content_bytes=cls.fmt.bytes_per_token)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True  # a checkpoint may bring fp8 scales; ours are computed per unit instead

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True  # which ones is decided in checks.py

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # decodes and prefills are told apart by the lengths on the host


class ResidualBackend(KVQBackend):
    """What vLLM asks about the companion layers: the same metadata, any block size."""

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec


@lru_cache(maxsize=64)
def backend_for(fmt: Format) -> type[KVQBackend]:
    """Return the backend class of layers with this format."""
    return type("KVQBackend", (KVQBackend,), {"fmt": fmt})


def check_layer(selector_config: Any, device_capability: Any) -> None:
    """Check one layer as vLLM is about to construct it, with vLLM's own words.

    Raises:
        KVQConfigError: when a kvq cache cannot serve the layer.

    """
    config = KVQConfig.parse(get_current_vllm_config().additional_config)
    fmt = config.format(selector_config.kv_cache_dtype, selector_config.head_size)
    refuse_layer(backend_for(fmt), selector_config, device_capability)


def refuse_layer(backend: type[KVQBackend], selector_config: Any, device_capability: Any) -> None:
    """Refuse a layer for the reasons that vLLM finds in what `backend` says of itself.

    Raises:
        KVQConfigError: there are reasons.

    """
    reasons = backend.validate_configuration(
        device_capability=device_capability, **selector_config._asdict()
    )
    if reasons:
        raise KVQConfigError(
            f"--kv-cache-dtype {selector_config.kv_cache_dtype} does not support a layer of this "
            f"model ({'; '.join(reasons)}): use --kv-cache-dtype auto."
        )


NO_TOKENS = (torch.empty(0), torch.empty(0))


class LayerImpl(AttentionImpl[KVQMetadata]):
    """What the impls of all kvq caches share: vLLM's parameters and the way to the layer.

    Where vLLM has layers share a cache, the first of them owns it and the others only read it. They
    get no keys and values of their own, so the owner keeps its new ones for them.

    Attributes:
        shared_name: the layer whose cache this one reads, or None for its own.
        owner: the layer that owns the cache, once the weights are loaded; None for this one.
        last_reader: of an owner, the impl that reads the cache last in every step.

    """

    supports_pcp = False
    supports_dcp = False

    shared_name: str | None = None
    owner: Any = None
    last_reader: LayerImpl | None = None
    _kept_tokens: tuple[torch.Tensor, torch.Tensor] = NO_TOKENS

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Take vLLM's parameters of one layer."""
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.shared_name = kv_sharing_target_layer_name
        self.params = AttentionParams(
            scale=self.scale,
            soft_cap=logits_soft_cap or None,
            sliding_window=sliding_window,
        )
        self.vllm_config = get_current_vllm_config()
        self.config = KVQConfig.parse(self.vllm_config.additional_config)
        runner_v1 = not self.vllm_config.use_v2_model_runner
        if self.vllm_config.speculative_config is not None and runner_v1:
            speculation.take_over()
        if current_platform.is_cpu():
            zeroing.take_over()
        self.set_up()

    def set_up(self) -> None:
        """Finish construction, with :attr:`config` at hand."""
        raise NotImplementedError

    def find_layer(self) -> tuple[str, Any]:
        """Return the layer that this impl belongs to and its name, once all layers exist.

        Raises:
            KVQConfigError: the layer's cache holds something else than an ``Attention`` layer's.

        """
        layers = self.vllm_config.compilation_config.static_forward_context
        name = next(name for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        _check_attention_class(name, layers[name], self.kv_cache_dtype)
        self._find_sharing(name, layers)
        return name, layers[name]

    def _find_sharing(self, name: str, layers: dict[str, Any]) -> None:
        """Set :attr:`owner` and :attr:`last_reader`; models construct layers in running order."""
        if self.shared_name is not None:
            self.owner = layers[self.shared_name]
        sharing = [
            layer.impl
            for layer in layers.values()
            if getattr(layer, "kv_sharing_target_layer_name", None) == name
        ]
        self.last_reader = sharing[-1] if sharing else None

    @property
    def reads_last(self) -> bool:
        """Whether no other layer reads this one's cache after it in a step."""
        owner = self if self.owner is None else self.owner.impl
        return owner.last_reader in (None, self)

    def exchange_tokens(
        self, key: torch.Tensor, value: torch.Tensor, needed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's new keys and values, the owner's where the cache is another layer's.

        Args:
            key: ``[num_tokens, num_kv_heads, head_size]``; of an owner, else ignored.
            value: as `key`.
            needed: whether the layers that share the cache need them.

        """
        if self.owner is not None:
            owner = self.owner.impl
            kept: tuple[torch.Tensor, torch.Tensor] = owner._kept_tokens
            if self.reads_last:
                owner._kept_tokens = NO_TOKENS
            return kept
        if needed and self.last_reader is not None:
            # Copies: compiled models and CUDA graphs reuse the memory once this layer is done.
            self._kept_tokens = key.clone(), value.clone()
        return key, value

    def complete_params(self, layer: Any, device: torch.device) -> None:
        """Put what is known only once the weights are loaded into :attr:`params`."""
        slopes = self.params.alibi_slopes
        if slopes is None and self.alibi_slopes is not None:
            slopes = torch.tensor(self.alibi_slopes, dtype=torch.float32, device=device)
            keep_through_sleep(layer, "_kvq_alibi_slopes", slopes)
        self.params = dataclasses.replace(self.params, sinks=self.sinks, alibi_slopes=slopes)


def keep_through_sleep(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """Make a tensor on the device a buffer of its layer.

    What is allocated while the weights load loses its content in sleep mode's level 2, except for
    the model's buffers: vLLM saves them and puts them back in place.
    """
    layer.register_buffer(name, tensor, persistent=False)


def say_which_kernels(kernels: Any, is_reference: bool, device: torch.device) -> None:
    """Log the kernels in use, once, with a warning if they are slow."""
    if is_reference:
        logger.warning_once(
            "kvq: running the reference kernels, correct but slow: %s",
            fallback_reason(device) or f"{ENV_VAR} is set.",
        )
    else:
        logger.info_once("kvq: running the kernels of %s.", kernels.__name__)


class KVQImpl(LayerImpl):
    """Runs one attention layer on a cache of sealed units and a ring."""

    def set_up(self) -> None:
        self.fmt = self.config.format(self.kv_cache_dtype, self.head_size)
        # Set once the weights are loaded.
        self.residual_name: str | None = None
        self.kernels: Kernels = reference

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Find the layer this impl belongs to and give it its companion, if it has a cache.

        It is the one moment after all layers exist and before vLLM asks for cache specs. It
        comes again when weights are reloaded; the companion, and its cache, then stay.
        """
        name, layer = self.find_layer()
        layers = self.vllm_config.compilation_config.static_forward_context
        layer.attn_backend = backend_for(self.fmt)
        self.residual_name = (self.shared_name or name) + LAYER_SUFFIX
        if self.shared_name is None and self.residual_name not in layers:
            layers[self.residual_name] = ResidualLayer(layer, self.fmt, ResidualBackend)
        device = layer._k_scale.device
        self.kernels = select_kernels(device)
        if self.fmt.name == DEBUG_FORMAT:
            self.kernels = debug.PerToken(self.kernels)
        say_which_kernels(self.kernels, self.kernels is reference, device)
        for i, table in enumerate(self.kernels.prepare(self.fmt, device)):
            keep_through_sleep(layer, f"_kvq_table_{i}", table)
        self.complete_params(layer, device)

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
        """Seal, write the ring, attend.

        Args:
            layer: the attention layer.
            query: ``[num_tokens, num_heads, head_size]``; rows may be padding.
            key: ``[num_tokens, num_kv_heads, head_size]``; None if the cache is another layer's.
            value: as `key`.
            kv_cache: uint8 ``[num_blocks, num_kv_heads, block_size, bytes_per_token]``.
            attn_metadata: of the pages' group; None in a memory profiling run.
            output: written, shape of `query`.
            output_scale: not supported.
            output_block_scale: not supported.

        Returns:
            `output`.

        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvq caches do not support fused output quantisation")
        prefills = attn_metadata is None or attn_metadata.prefills is not None
        key, value = self.exchange_tokens(key, value, needed=prefills)
        if attn_metadata is None:  # the run that measures the memory besides the cache
            self._reserve_workspace(query.device)
            return output.fill_(0)
        assert self.residual_name is not None
        residual = get_forward_context().no_compile_layers[self.residual_name]
        ring = residual.ring
        # Tokens are the same whether read back from the ring or not yet written to it.
        key, value = key.to(ring.dtype), value.to(ring.dtype)
        cache = LayerCache(
            fmt=self.fmt,
            pages=kv_cache,
            block_table=attn_metadata.block_table,
            ring=ring,
            ring_table=_metadata_of(self.residual_name).block_table,
            ring_capacity=residual.spec.capacity,
        )
        self._run(query, key, value, cache, attn_metadata, output)
        return output

    def _reserve_workspace(self, device: torch.device) -> None:
        """Make vLLM's memory profile count what the kernels allocate for a step.

        They take it from PyTorch's allocator, layer by layer, so one layer's counts.
        """
        config = self.vllm_config
        num_bytes = self.kernels.workspace_bytes(
            self.fmt,
            config.scheduler_config.max_num_seqs,
            1 + config.num_speculative_tokens,
            self.num_heads,
            self.num_kv_heads,
            config.model_config.max_model_len + config.cache_config.block_size,
            device,
        )
        torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: KVQMetadata,
        output: torch.Tensor,
    ) -> None:
        """Run one step in the order that ``kvq_kernels.reference`` explains.

        The cache's owner stores, but what prefills read of the ring is overwritten only after
        the last layer that shares it.
        """
        kernels, num_decodes, owns = self.kernels, metadata.num_decodes, self.owner is None
        if metadata.prefills is None:
            if owns:
                kernels.store(key, value, cache, metadata.requests)
            kernels.decode(query, cache, metadata.requests, self.params, output)
            return
        if owns:
            kernels.seal(key, value, cache, metadata.requests)
        if metadata.decodes is not None:
            part = cache.requests(0, num_decodes)
            if owns:
                kernels.write_ring(key, value, part, metadata.decodes)
            rows = slice(metadata.num_decode_tokens)
            kernels.decode(query[rows], part, metadata.decodes, self.params, output[rows])
        part = cache.requests(num_decodes, None)
        kernels.prefill(query, key, value, part, metadata.prefills, self.params, output)
        if self.reads_last:
            kernels.write_ring(key, value, part, metadata.prefills)


def _check_attention_class(name: str, layer: Any, cache_dtype: str) -> None:
    """Refuse layers that change what an ``Attention`` layer's cache holds."""
    if type(layer) is not Attention or layer.head_size_v != layer.head_size:
        raise KVQConfigError(
            f"--kv-cache-dtype {cache_dtype} does not support layer {name} "
            f"({type(layer).__name__}, head sizes {layer.head_size} and {layer.head_size_v}): "
            "use --kv-cache-dtype auto for this model."
        )


def _metadata_of(layer_name: str) -> KVQMetadata:
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):  # as vLLM does: the first entry is the target model's
        metadata = metadata[0]
    return metadata[layer_name]
