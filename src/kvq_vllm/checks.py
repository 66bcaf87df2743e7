"""Refusals: what a kvq cache cannot be combined with, said before the model loads.

One function per subject, each raising :class:`KVQConfigError` with one sentence that names the
option and a way out. They read vLLM's configuration objects by public attributes only.
"""

from __future__ import annotations

import os
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kvq_kernels.fp8 import BLOCK_SIZE_MULTIPLE, is_fp8
from kvq_vllm import connectors
from kvq_vllm.config import KVQConfig, KVQConfigError, is_kvq

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.34")
ALLOW_UNTESTED = "KVQ_ALLOW_UNTESTED_VLLM"

TESTED_SPECULATION = frozenset({"ngram", "draft_model", "eagle"})
OUR_BACKEND = "KVQ_ATTN"


def version_problem(vllm_version: str) -> str | None:
    """Return why this vLLM is not supported, or None."""
    if os.environ.get(ALLOW_UNTESTED) == "1":
        return None
    try:
        version = Version(Version(vllm_version).base_version)
    except InvalidVersion:
        version = Version("0")
    if version in SUPPORTED_VLLM:
        return None
    return (
        f"kvq cache dtypes need vLLM {SUPPORTED_VLLM} but found {vllm_version}: install a "
        f"supported version, use --kv-cache-dtype auto, or set {ALLOW_UNTESTED}=1 to try anyway."
    )


def check_config(vllm_config: Any) -> None:
    """Check a ``VllmConfig`` whose cache dtype is one of ours.

    Raises:
        KVQConfigError: the first thing found that cannot work.

    """
    cache_dtype = vllm_config.cache_config.cache_dtype
    assert is_kvq(cache_dtype)
    config = KVQConfig.parse(vllm_config.additional_config)
    config.refuse_useless(cache_dtype)
    _check_model(cache_dtype, vllm_config.model_config, config)
    _check_block_size(vllm_config.cache_config, config)
    _check_other_caches(cache_dtype, vllm_config)
    if is_fp8(cache_dtype):
        _check_scales(vllm_config, config)
    _check_parallel(cache_dtype, vllm_config.parallel_config)
    _check_connectors(cache_dtype, vllm_config, config)
    _check_speculation(cache_dtype, vllm_config.speculative_config, config)
    _check_backend(cache_dtype, vllm_config)
    _check_kernels()


def _refuse(option: str, reason: str, way_out: str) -> None:
    raise KVQConfigError(f"{option} {reason}: {way_out}.")


def _check_model(cache_dtype: str, model_config: Any, config: KVQConfig) -> None:
    if model_config is None:
        return
    option, auto = f"--kv-cache-dtype {cache_dtype}", "use --kv-cache-dtype auto for this model"
    if model_config.use_mla:
        _refuse(option, "does not support multi-head latent attention (MLA)", auto)
    kinds = {
        "encoder_only": "encoder-only attention, which keeps no KV cache",
        "encoder_decoder": "encoder-decoder models (cross attention)",
        "attention_free": "models without attention, which have no KV cache",
    }
    if reason := kinds.get(model_config.attn_type):
        _refuse(option, f"does not support {reason}", auto)
    if model_config.attention_chunk_size is not None:
        reason = "whose chunks vLLM hands over as requests of their own"
        _refuse(option, f"does not support chunked local attention, {reason}", auto)
    text_config = model_config.hf_text_config
    head_size = model_config.get_head_size()
    if getattr(text_config, "v_head_dim", None) not in (None, head_size):
        _refuse(option, "does not support values of another head size than keys", auto)
    (config.fp8_format if is_fp8(cache_dtype) else config.format)(cache_dtype, head_size)


def _check_block_size(cache_config: Any, config: KVQConfig) -> None:
    fp8 = is_fp8(cache_config.cache_dtype)
    unit = BLOCK_SIZE_MULTIPLE if fp8 else config.unit_size
    if cache_config.user_specified_block_size and cache_config.block_size % unit:
        _refuse(
            f"--block-size {cache_config.block_size}",
            f"is no multiple of {'' if fp8 else 'the kvq unit size '}{unit}",
            f"use a multiple of {unit}, or leave --block-size out",
        )
    match_unit = cache_config.prefix_match_unit
    if match_unit is not None and match_unit != cache_config.block_size:
        _refuse(
            f"--prefix-match-unit {match_unit}",
            f"is not the block size {cache_config.block_size}, but a kvq page can only be reused "
            "whole",
            "leave --prefix-match-unit out",
        )


def _check_other_caches(cache_dtype: str, vllm_config: Any) -> None:
    """Check options that layers which share a cache, or Mamba layers, do not allow."""
    cache_config, model_config = vllm_config.cache_config, vllm_config.model_config
    if cache_config.kv_sharing_fast_prefill:
        _refuse(
            "--kv-sharing-fast-prefill",
            "has layers attend to only some of a step's tokens, which "
            f"--kv-cache-dtype {cache_dtype} does not support",
            "leave it out",
        )
    skipped = cache_config.kv_cache_dtype_skip_layers
    if model_config is None or not skipped:
        return
    if model_config.is_hybrid:
        _refuse(
            "--kv-cache-dtype-skip-layers",
            "is not supported for models that mix attention with Mamba layers, whose pages vLLM "
            "makes as large as those of one cache dtype",
            "leave it out",
        )
    shares = getattr(model_config.hf_text_config, "num_kv_shared_layers", 0)
    if shares and any(layer.isdigit() for layer in skipped):
        _refuse(
            "--kv-cache-dtype-skip-layers",
            "with numbers of layers is not supported for models whose layers share caches, which "
            "need one dtype",
            'leave it out, or use "sliding_window"',
        )


def _check_scales(vllm_config: Any, config: KVQConfig) -> None:
    """Check where fp8 scales come from, as far as it shows before the model loads."""
    from kvq_vllm import checkpoint, scales

    if config.scales == "warmup":
        way_out = 'write them with "scales_out" in a plain set-up and use "scales_in" here'
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            _refuse("--pipeline-parallel-size", 'above 1 cannot measure "scales" yet', way_out)
        if vllm_config.lora_config is not None:
            _refuse("--enable-lora", 'cannot be combined with "scales": "warmup" yet', way_out)
        if config.scales_out is not None:
            scales.check_writable(config.scales_out)
    elif config.scales_in is not None:
        scales.read_scales(config.scales_in, vllm_config.cache_config.cache_dtype)
    elif config.scales == "checkpoint" and vllm_config.model_config is not None:
        checkpoint.check_scales(vllm_config.model_config)


def _check_parallel(cache_dtype: str, parallel_config: Any) -> None:
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel_config, field) > 1:
            _refuse(
                f"--{field.replace('_', '-')}",
                f"above 1 is not supported with --kv-cache-dtype {cache_dtype}",
                "set it to 1, or use --tensor-parallel-size",
            )


def _check_connectors(cache_dtype: str, vllm_config: Any, config: KVQConfig) -> None:
    connector = connectors.chosen(vllm_config)
    if connector is None:
        return
    offloading = vllm_config.cache_config.kv_offloading_size is not None
    option = "--kv-offloading-size" if offloading else "--kv-transfer-config"
    transfer = vllm_config.kv_transfer_config
    module = getattr(transfer, "kv_connector_module_path", None)
    tested = connectors.tested_with(cache_dtype)
    if connector not in tested or module:
        ring = connectors.has_ring(cache_dtype)
        _refuse(
            f"{option} with connector {connector}" + (f" of {module}" if module else ""),
            f"is not known to work with --kv-cache-dtype {cache_dtype}"
            + (", whose newest tokens lie outside the pages that it moves" if ring else ""),
            f"use {' or '.join(sorted(tested))}"
            + (", --kv-cache-dtype kvq-fp8" if ring else "")
            + ", or --kv-cache-dtype auto",
        )
    if getattr(vllm_config.model_config, "attn_type", None) == "hybrid":
        _refuse(
            f"{option} with connector {connector}",
            "may end a hit inside a page where a model mixes attention with Mamba or linear layers",
            "leave it out for this model",
        )
    store = (getattr(transfer, "kv_connector_extra_config", None) or {}).get("spec_name")
    if connector == connectors.OFFLOADING and store not in (None, connectors.CPU_MEMORY):
        _refuse(
            f'{option} with "spec_name": "{store}"',
            "keeps pages under names that do not tell kvq options and scales apart",
            "leave it out, for pages in CPU memory",
        )
    if connector == connectors.EXAMPLE and config.scales == "warmup":
        _refuse(
            f"{option} with connector {connector}",
            'cannot be combined with "scales": "warmup", because every engine that reads the pages '
            "would measure its own",
            'write them with "scales_out" first and use "scales_in" here',
        )


def _check_speculation(cache_dtype: str, speculative_config: Any, config: KVQConfig) -> None:
    """Check the method, and the drafter's model where its cache is one of ours."""
    if speculative_config is None or speculative_config.method is None:
        return
    option, method = "--speculative-config", speculative_config.method
    if method not in TESTED_SPECULATION:
        _refuse(
            option,
            f"with method {method} is not supported with --kv-cache-dtype {cache_dtype} yet",
            f"use one of {', '.join(sorted(TESTED_SPECULATION))}, or --kv-cache-dtype auto",
        )
    if speculative_config.parallel_drafting:
        _refuse(
            option,
            f"with parallel_drafting is not supported with --kv-cache-dtype {cache_dtype} yet",
            "leave parallel_drafting out",
        )
    if method == "ngram":
        return
    drafter_dtype = speculative_config.kv_cache_dtype or cache_dtype
    if is_kvq(drafter_dtype):
        _check_model(drafter_dtype, speculative_config.draft_model_config, config)
    if is_fp8(drafter_dtype) and (config.scales == "warmup" or config.scales_in is not None):
        _refuse(
            option,
            f"gives the drafter a {drafter_dtype} cache, but measured scales are those of the "
            "target model alone",
            'add "kv_cache_dtype": "auto" to it',
        )


def refuse_drafter(vllm_config: Any) -> None:
    """Refuse a kvq cache for the drafter of a target model that has none.

    Raises:
        KVQConfigError: always.

    """
    _refuse(
        f"--speculative-config with kv_cache_dtype {vllm_config.speculative_config.kv_cache_dtype}",
        "needs a kvq --kv-cache-dtype for the target model too",
        "leave kv_cache_dtype out of it, or choose a kvq --kv-cache-dtype",
    )


def _check_backend(cache_dtype: str, vllm_config: Any) -> None:
    attention = vllm_config.attention_config
    if attention.use_non_causal:
        _refuse(
            f"--kv-cache-dtype {cache_dtype}",
            "does not support non-causal attention",
            "use --kv-cache-dtype auto for this model",
        )
    if vllm_config.cache_config.kv_cache_dtype_skip_layers:
        return  # the skipped layers may use any backend
    for backend in (attention.backend, *(attention.backend_per_kind or {}).values()):
        if backend is not None and backend.name != OUR_BACKEND:
            _refuse(
                f"--attention-backend {backend.name}",
                f"cannot read --kv-cache-dtype {cache_dtype}, which brings its own backend",
                "leave --attention-backend and backend_per_kind out",
            )


def _check_kernels() -> None:
    """Fail early on a bad ``KVQ_KERNELS``."""
    import torch
    from vllm.platforms import current_platform

    from kvq_kernels.dispatch import select_kernels

    try:
        select_kernels(torch.device(current_platform.device_type))
    except ValueError as error:
        raise KVQConfigError(str(error)) from None
