"""Every private or changeable thing of vLLM that we rely on, by name.

When a new vLLM fails here, the ids of the failed tests are the list of what moved.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

# Names that must exist: "module:object.attribute".
NAMES = [
    "vllm:__version__",
    "vllm.benchmarks.serve:add_cli_args",
    "vllm.benchmarks.serve:main",
    "vllm.config:CacheConfig",
    "vllm.config:SpeculativeConfig",
    "vllm.config:VllmConfig",
    "vllm.config:get_current_vllm_config",
    "vllm.config.cache:CacheDType",
    "vllm.engine.arg_utils:EngineArgs",
    "vllm.forward_context:get_forward_context",
    "vllm.model_executor.layers.attention:Attention.process_weights_after_loading",
    "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec",
    "vllm.model_executor.layers.quantization.kv_cache:is_quantized_kv_cache",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.bind_kv_cache",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:"
    "GroupOffloadConfig.sliding_window_size_in_chunks",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:"
    "SchedulerOffloadConfig.kv_group_configs",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:"
    "OffloadingConnector._max_loadable_tokens",
    "vllm.envs:VLLM_USE_SIMPLE_KV_OFFLOAD",
    "vllm.envs:environment_variables",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:"
    "CompressedTensorsKVCacheMethod.create_weights",
    "vllm.platforms:current_platform.device_type",
    "vllm.distributed:get_tensor_model_parallel_rank",
    "vllm.distributed:get_tp_group",
    "vllm.platforms:current_platform.get_attn_backend_cls",
    "vllm.platforms:current_platform.update_block_size_for_backend",
    "vllm.platforms:current_platform.check_and_update_config",
    "vllm.platforms:current_platform.get_device_capability",
    "vllm.plugins:load_general_plugins",
    "vllm.usage.usage_lib:UsageContext.OPENAI_API_SERVER",
    "vllm.sampling_params:SamplingParams.flat_logprobs",
    "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE",
    "vllm.v1.attention.backend:AttentionImpl.supports_dcp",
    "vllm.v1.attention.backend:AttentionImpl.supports_pcp",
    "vllm.v1.attention.backend:AttentionMetadataBuilder._init_reorder_batch_threshold",
    "vllm.v1.attention.backend:AttentionBackend.validate_configuration",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.__members__",
    "vllm.v1.core.single_type_kv_cache_manager:CircularBufferManager",
    "vllm.v1.attention.backends.utils:get_supported_kv_cache_layouts",
    "vllm.v1.attention.backends.utils:resolve_kv_cache_layout",
    "vllm.v1.core.kv_cache_utils:get_kv_cache_capacity",
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests",
    "vllm.v1.engine.llm_engine:LLMEngine.step",
    "vllm.utils.import_utils:resolve_obj_by_qualname",
    "vllm.v1.kv_cache_interface:KVQuantMode.FP8_PER_TENSOR",
    "vllm.v1.kv_cache_interface:KVQuantMode.NONE",
    "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
    "vllm.v1.kv_cache_layout:KVCacheLayout.BLHNC",
    "vllm.v1.kv_cache_layout:KVCacheLayout.LBHNC",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered",
]

# Functions and the parameters that we pass, or that our replacements take.
PARAMETERS = {
    "vllm.platforms:current_platform.get_attn_backend_cls": [
        "selected_backend",
        "attn_selector_config",
        "num_heads",
    ],
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:"
    "OffloadingConnector._max_loadable_tokens": ["request", "num_computed_tokens"],
    "vllm.forward_context:set_forward_context": ["attn_metadata", "vllm_config", "num_tokens"],
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:"
    "CompressedTensorsKVCacheMethod.create_weights": ["layer"],
    "vllm.model_executor.layers.quantization.kv_cache:is_quantized_kv_cache": ["kv_cache_dtype"],
    "vllm.platforms:current_platform.check_and_update_config": ["vllm_config"],
    "vllm.v1.attention.backends.registry:register_backend": ["backend", "class_path"],
    "vllm.v1.attention.backends.utils:split_decodes_and_prefills": [
        "common_attn_metadata",
        "decode_threshold",
    ],
    "vllm.v1.attention.backend:AttentionMetadataBuilder._init_reorder_batch_threshold": [
        "reorder_batch_threshold",
        "supports_spec_as_decode",
    ],
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": [
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ],
    "vllm.v1.attention.backends.utils:resolve_kv_cache_layout": [
        "vllm_config",
        "supported_layouts",
        "kv_cache_specs",
    ],
    "vllm.v1.core.kv_cache_utils:get_kv_cache_capacity": ["vllm_config", "kv_cache_config"],
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": ["request_id", "prompt", "params"],
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": [
        "kvcache_spec_cls",
        "manager_class",
        "uniform_type_base_spec",
    ],
}

# Dataclasses and the fields that we read or set.
FIELDS = {
    "vllm.v1.kv_cache_interface:AttentionSpec": [
        "block_size",
        "num_kv_heads",
        "head_size",
        "dtype",
        "kv_quant_mode",
        "page_size_padded",
        "state_content_bytes",
        "dcp_sharded",
    ],
    "vllm.v1.attention.backend:CommonAttentionMetadata": [
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "num_reqs",
        "block_table_tensor",
    ],
    "vllm.forward_context:ForwardContext": ["no_compile_layers", "attn_metadata"],
    "vllm.config:CacheConfig": [
        "block_size",
        "user_specified_block_size",
        "prefix_match_unit",
        "cache_dtype",
        "kv_cache_dtype_skip_layers",
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
    ],
    "vllm.config:KVTransferConfig": [
        "kv_connector",
        "kv_connector_extra_config",
        "kv_connector_module_path",
    ],
    "vllm.logprobs:FlatLogprobs": ["token_ids", "logprobs", "ranks"],
    "vllm.config:ParallelConfig": [
        "data_parallel_rank",
        "decode_context_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "worker_cls",
    ],
    "vllm.config:SpeculativeConfig": ["method", "num_speculative_tokens"],
    "vllm.config:VllmConfig": [
        "additional_config",
        "attention_config",
        "cache_config",
        "compilation_config",
        "kv_transfer_config",
        "load_config",
        "lora_config",
        "model_config",
        "parallel_config",
        "speculative_config",
    ],
    "vllm.config:CompilationConfig": ["static_forward_context"],
    "vllm.config:LoadConfig": ["load_format"],
    "vllm.config:SchedulerConfig": ["max_num_batched_tokens"],
    "vllm.config:AttentionConfig": ["backend", "backend_per_kind", "use_non_causal"],
}


def resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    thing = importlib.import_module(module)
    for attribute in path.split("."):
        thing = getattr(thing, attribute)
    return thing


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name: str) -> None:
    resolve(name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_function_takes(name: str) -> None:
    parameters = list(inspect.signature(resolve(name)).parameters)
    if parameters[0] in ("self", "cls"):
        del parameters[0]
    assert parameters[: len(PARAMETERS[name])] == PARAMETERS[name]


@pytest.mark.parametrize("name", FIELDS)
def test_dataclass_has(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(resolve(name))}
    assert set(FIELDS[name]) <= fields


@pytest.mark.parametrize(
    "attribute",
    [
        "use_mla",
        "attn_type",
        "attention_chunk_size",
        "hf_config",
        "hf_text_config",
        "get_head_size",
        "get_total_num_kv_heads",
        "get_vocab_size",
        "uses_mrope",
    ],
)
def test_model_config_has(attribute: str) -> None:
    from vllm.config import ModelConfig

    names = {field.name for field in dataclasses.fields(ModelConfig)}
    assert (
        attribute in names
        or hasattr(ModelConfig, attribute)
        or attribute in inspect.getsource(ModelConfig)
    )


def test_what_our_backend_overrides_is_still_asked_for() -> None:
    from vllm.v1.attention.backend import AttentionBackend

    from kvq_vllm.backend import KVQBackend

    ours = {name for name in vars(KVQBackend) if not name.startswith("__")} - {"fmt"}
    ours -= {"_abc_impl"}
    assert {name for name in ours if not hasattr(AttentionBackend, name)} == set()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            "kvq_vllm.residual:ResidualManager",
            "vllm.v1.core.single_type_kv_cache_manager:CircularBufferManager",
        ),
        (
            "kvq_vllm.residual:ResidualSpec",
            "vllm.v1.kv_cache_interface:CircularBufferSpec",
        ),
    ],
)
def test_overridden_methods_have_the_same_parameters(ours: str, theirs: str) -> None:
    our_class, their_class = resolve(ours), resolve(theirs)
    for name, method in vars(our_class).items():
        if (
            not inspect.isfunction(method)
            or name.startswith("__")
            or not hasattr(their_class, name)
        ):
            continue
        expected = inspect.signature(getattr(their_class, name)).parameters
        assert list(inspect.signature(method).parameters) == list(expected), name


@pytest.mark.parametrize("impl", ["kvq_vllm.backend:KVQImpl", "kvq_vllm.fp8:Fp8Impl"])
def test_impl_takes_what_an_attention_layer_passes(impl: str) -> None:
    """``Attention.__init__`` passes these by position, and "sinks" by name."""
    from vllm.v1.attention.backend import AttentionImpl

    theirs = list(inspect.signature(AttentionImpl.__init__).parameters)
    ours = list(inspect.signature(resolve(impl).__init__).parameters)
    assert ours[: len(theirs)] == theirs
    forward = list(inspect.signature(AttentionImpl.forward).parameters)
    assert list(inspect.signature(resolve(impl).forward).parameters) == forward


def test_a_layers_scales_have_the_names_that_we_set() -> None:
    import torch
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    for name in ("_k_scale", "_v_scale"):
        assert name in dict(layer.named_buffers())  # which sleep mode saves
        assert isinstance(getattr(layer, f"{name}_float"), float)
        assert isinstance(getattr(layer, f"{name}_cpu"), torch.Tensor)


def test_planning_has_one_of_the_two_known_ways() -> None:
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # vLLM 0.32
        from vllm.v1.core import kv_cache_utils as planning
    else:
        assert callable(planning.get_global_kv_cache_groups)
    parameters = list(inspect.signature(planning.get_kv_cache_configs).parameters)
    assert parameters[:3] == ["vllm_config", "kv_cache_specs", "available_memory"]


def test_dtype_registration_has_one_of_the_two_known_ways() -> None:
    import vllm.config.cache as cache
    from vllm.engine import arg_utils

    if hasattr(cache, "register_kv_cache_dtype"):
        assert callable(cache.is_known_kv_cache_dtype)
    else:
        assert "auto" in cache.CacheDType.__args__
        assert hasattr(arg_utils._compute_kwargs, "cache_clear")
