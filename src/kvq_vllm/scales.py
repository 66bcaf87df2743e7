"""Scales of the fp8 formats: from the checkpoint, 1.0, measured at start-up, or from a file.

vLLM keeps a layer's scales in the buffers ``_k_scale`` and ``_v_scale`` and sets them whenever it
loads weights; sleep mode saves buffers. We have the last word each time, :func:`settle`: from then
on they hold one scale per kv head of this rank, positive and finite, and the kernels read them
there. They change in place only, because CUDA graphs remember addresses.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvq_kernels.fp8 import FP8_DTYPES, is_fp8
from kvq_vllm.config import KVQConfig, KVQConfigError
from kvq_vllm.reading import read_json
from kvq_vllm.wrapping import wrap_once

HEADROOM = 2.0
"""Measured scales map twice the largest value seen to the largest code. In a float format that
costs no precision, except for elements so small that they hardly matter."""

MEASURED_TOKENS = 512
SEED = 0

ALTERNATIVES = (
    'additional_config["kvq"]["scales"] = "warmup" measures them at start-up, and a checkpoint '
    "calibrated with llm-compressor brings its own (docs/fp8.md)"
)
UNCALIBRATED = (
    "kvq: the checkpoint has no KV cache scales, so %s uses 1.0: keys and values beyond "
    "%g saturate, and heads with small values lose precision; " + ALTERNATIVES + "."
)


def take_over() -> None:
    """Make vLLM load and reload scales for our dtypes, and let :func:`settle` have the last word.

    May be called any number of times.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization import kv_cache
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsKVCacheMethod,
    )

    def known(original: Callable[[str], bool]) -> Callable[[str], bool]:
        return lambda cache_dtype: original(cache_dtype) or is_fp8(cache_dtype)

    def settled(original: Callable[..., None]) -> Callable[..., None]:
        def process_weights_after_loading(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if is_fp8(self.kv_cache_dtype):
                settle(self)

        return process_weights_after_loading

    def reloadable(original: Callable[..., None]) -> Callable[..., None]:
        def create_weights(self: Any, layer: Any) -> None:
            original(self, layer)
            for parameter in layer.parameters(recurse=False):
                loader = getattr(parameter, "weight_loader", None)
                if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
                    loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]

        return create_weights

    # Needed for vLLM 0.32; later ones ask the dtype's handler.
    wrap_once(kv_cache, "is_quantized_kv_cache", known)
    # Scales per head have partial functions for loaders, and vLLM's reload asks for their names.
    wrap_once(CompressedTensorsKVCacheMethod, "create_weights", reloadable)
    wrap_once(Attention, "process_weights_after_loading", settled)


# --- one layer -------------------------------------------------------------------------------


def settle(layer: Any) -> None:
    """Give a layer its scales, after vLLM has loaded those of the checkpoint.

    Scales that were measured or read stay the same when weights are reloaded, because the cache
    still holds what was written with them.

    Args:
        layer: an ``Attention`` layer whose impl is a :class:`kvq_vllm.fp8.Fp8Impl`.

    Raises:
        KVQConfigError: a scale is not positive and finite.

    """
    impl = layer.impl
    if impl.shared_name is not None:
        return  # its cache is written with the owner's
    config: KVQConfig = impl.config
    if config.scales_in is not None and impl.frozen_scales is None:
        impl.frozen_scales = _scales_of_layer(layer, config.scales_in)
    if impl.frozen_scales is not None:
        key, value = impl.frozen_scales
    elif config.scales == "checkpoint" and impl.vllm_config.load_config.load_format != "dummy":
        key, value = (_loaded_scale(layer, name) for name in ("k_scale", "v_scale"))
        if layer.kv_cache_dtype != "kvq-fp8_e5m2" and (key == 1).all() and (value == 1).all():
            impl.logger.warning_once(UNCALIBRATED, layer.kv_cache_dtype, impl.fmt.largest)
    else:
        key = value = torch.ones(1)
    _set_scales(layer, key, value)


def _loaded_scale(layer: Any, name: str) -> torch.Tensor:
    """Return the scales that vLLM loaded, ``[1]`` or ``[num_kv_heads]``."""
    scale: torch.Tensor = getattr(layer, f"_{name}").detach().float().cpu().reshape(-1)
    if not (scale.isfinite() & (scale > 0)).all():
        model = layer.impl.vllm_config.model_config.model
        raise KVQConfigError(
            f"--kv-cache-dtype {layer.kv_cache_dtype} cannot be used: {layer.layer_name}.{name} of "
            f"{model} is {scale.tolist()} but must be positive and finite; calibrate the "
            f"checkpoint again, or ignore its scales with additional_config "
            f'{{"kvq": {{"scales": "warmup"}}}}.'
        )
    return scale


def _set_scales(layer: Any, key: torch.Tensor, value: torch.Tensor) -> None:
    """Set a layer's scales, ``[1]`` or ``[num_kv_heads]``, and vLLM's copies on the host."""
    for name, scale in (("_k_scale", key), ("_v_scale", value)):
        buffer = getattr(layer, name)
        scale = scale.to(buffer.device, torch.float32).expand(layer.num_kv_heads)
        if buffer.shape == scale.shape:
            buffer.copy_(scale)
        else:
            layer.register_buffer(name, scale.clone())
        largest = scale.max().item()  # as vLLM does for scales per head
        setattr(layer, f"{name}_float", largest)
        getattr(layer, f"{name}_cpu").fill_(largest)


# --- files -----------------------------------------------------------------------------------


def read_scales(path: str, cache_dtype: str) -> dict[str, dict[str, list[float]]]:
    """Read a file that ``scales_out`` wrote.

    Args:
        path: of the file.
        cache_dtype: whose code type must be the file's.

    Returns:
        layer name to ``{"k_scale": [...], "v_scale": [...]}``, one number or one per kv head of
        the whole model.

    Raises:
        KVQConfigError: the file is missing, malformed, for another type, or has a scale that is
            not positive and finite.

    """
    way_out = 'write it again with {"kvq": {"scales": "warmup", "scales_out": FILE}}'
    try:
        content = read_json(Path(path))
        code_type, layers = content["type"], content["layers"]
        tensors = {
            f"{layer}.{name}": layers[layer][name] for layer in layers for name in _SCALE_NAMES
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KVQConfigError(
            f"scales_in {path} cannot be read ({type(error).__name__}: {error}): {way_out}."
        ) from None
    if code_type != FP8_DTYPES[cache_dtype]:
        raise KVQConfigError(
            f"scales_in {path} is for {code_type}, but --kv-cache-dtype {cache_dtype} has "
            f"{FP8_DTYPES[cache_dtype]}: {way_out}."
        )
    for tensor, scale in tensors.items():
        if not isinstance(scale, list) or not scale or not all(map(_is_scale, scale)):
            raise KVQConfigError(
                f"scales_in {path}: {tensor} is {str(scale)[:80]} but must be a list of positive, "
                f"finite numbers: {way_out}."
            )
    return layers  # type: ignore[no-any-return]


_SCALE_NAMES = ("k_scale", "v_scale")


def _is_scale(x: Any) -> bool:
    """Whether a number of a file is positive and finite, also in fp32."""
    limits = torch.finfo(torch.float32)
    return type(x) in (int, float) and limits.tiny <= x <= limits.max


def _scales_of_layer(layer: Any, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's key and value scales of a layer from a file."""
    layers = read_scales(path, layer.kv_cache_dtype)
    if layer.layer_name not in layers:
        raise KVQConfigError(
            f"scales_in {path} has no layer {layer.layer_name}: it was written for another model."
        )
    key, value = (_own_heads(layers[layer.layer_name][n], layer, n, path) for n in _SCALE_NAMES)
    return key, value


def _own_heads(scale: list[float], layer: Any, name: str, path: str) -> torch.Tensor:
    """Return what belongs to this tensor-parallel rank, ``[1]`` or ``[num_kv_heads]``."""
    from vllm.distributed import get_tp_group

    # On the host, which sleep mode leaves alone, and not in the model's dtype, vLLM's default here.
    own_scale = functools.partial(torch.tensor, dtype=torch.float32, device="cpu")
    rank, ranks, own = _tp_rank(), get_tp_group().world_size, layer.num_kv_heads
    if len(scale) == 1:
        return own_scale(scale)
    if len(scale) == ranks * own:
        return own_scale(scale[rank * own : (rank + 1) * own])
    if own == 1 and ranks % len(scale) == 0:  # each head on several ranks
        return own_scale([scale[rank // (ranks // len(scale))]])
    raise KVQConfigError(
        f"scales_in {path}: {layer.layer_name}.{name} has {len(scale)} scales, but the layer has "
        f"{ranks * own} kv heads: it was written for another model."
    )


def check_writable(path: str) -> None:
    """Refuse a ``scales_out`` that cannot be written, before the model loads.

    Raises:
        KVQConfigError: its folder does not exist or is read-only, or it is a folder.

    """
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise KVQConfigError(
            f"scales_out {path} cannot be written: name a file in an existing, writable folder."
        )


# --- measuring at start-up ---------------------------------------------------------------------


def measure_at_start(vllm_config: Any) -> None:
    """Arrange that this process's worker measures its layers' scales before it serves.

    It does so once vLLM has profiled memory, before the cache exists and graphs are captured.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    def measuring(original: Callable[..., int]) -> Callable[..., int]:
        def determine_available_memory(self: Any) -> int:
            available = original(self)
            cache_dtype = self.vllm_config.cache_config.cache_dtype
            config = KVQConfig.parse(self.vllm_config.additional_config)
            if is_fp8(cache_dtype) and config.scales == "warmup":
                measure(self.vllm_config, self.model_runner.get_model(), self.device)
            return available

        return determine_available_memory

    worker_class = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    wrap_once(worker_class, "determine_available_memory", measuring)


@torch.inference_mode()
def measure(vllm_config: Any, model: torch.nn.Module, device: torch.device) -> None:
    """Measure and freeze the scales of all fp8 layers on one sequence of random tokens.

    The sequence has no padding, and in this one pass attention reads the layer's own keys and
    values, unquantised: so no layer sees the error of another's scales, nor a cache. Nothing is
    read back to the host before the pass is over.

    Args:
        vllm_config: the engine's configuration.
        model: the loaded model of this rank.
        device: where it runs.

    """
    layers = {
        name: layer
        for name, layer in vllm_config.compilation_config.static_forward_context.items()
        if is_fp8(getattr(layer, "kv_cache_dtype", None))
    }
    for layer in layers.values():
        layer.impl.start_measuring()
    _run_random_tokens(vllm_config, model, device)
    seen = {name: layer.impl.finish_measuring() for name, layer in layers.items()}
    layers = {n: layer for n, layer in layers.items() if layer.impl.shared_name is None}
    largest = _over_ranks([seen[name] for name in layers])
    per_head = KVQConfig.parse(vllm_config.additional_config).scale_per == "head"
    result = {}
    for (name, layer), found in zip(layers.items(), largest, strict=True):
        scales = _scales_from(found if per_head else found.amax((0, 2), keepdim=True), layer)
        own = scales[:, _tp_rank() if per_head else 0]
        layer.impl.frozen_scales = (own[0], own[1])
        _set_scales(layer, *layer.impl.frozen_scales)
        result[name] = {
            n: _distinct_heads(s, vllm_config) for n, s in zip(_SCALE_NAMES, scales, strict=True)
        }
    _report(result, vllm_config)


def _run_random_tokens(vllm_config: Any, model: torch.nn.Module, device: torch.device) -> None:
    from vllm.forward_context import set_forward_context

    model_config = vllm_config.model_config
    count = min(
        MEASURED_TOKENS,
        model_config.max_model_len,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
    # The same tokens on every rank and at every start.
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(model_config.get_vocab_size(), (count,), generator=generator)
    positions = torch.arange(count, device=device)
    if model_config.uses_mrope:
        positions = positions.expand(3, -1).contiguous()
    with set_forward_context(None, vllm_config, num_tokens=count, skip_compiled=True):
        model(
            input_ids=tokens.to(device),
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=None,
        )


def _tp_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _over_ranks(largest: list[torch.Tensor]) -> list[torch.Tensor]:
    """Collect ``[2, num_kv_heads]`` per layer from all ranks, ``[ranks, 2, num_kv_heads]``."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    heads = max(seen.shape[1] for seen in largest)
    table = largest[0].new_zeros(len(largest), group.world_size, 2, heads)
    for row, seen in zip(table, largest, strict=True):
        row[group.rank_in_group, :, : seen.shape[1]] = seen
    if group.world_size > 1:
        maximum = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(table, op=maximum, group=group.device_group)
    table = table.cpu()
    return [row[:, :, : seen.shape[1]] for row, seen in zip(table, largest, strict=True)]


def _scales_from(largest: torch.Tensor, layer: Any) -> torch.Tensor:
    """Turn largest magnitudes ``[ranks, 2, heads]`` into scales ``[2, ranks, heads]``."""
    scales = (largest * (HEADROOM / layer.impl.fmt.largest)).transpose(0, 1)
    # A head that is always 0, or almost, has no use for a scale.
    return torch.where(scales > torch.finfo(torch.float32).tiny, scales, 1.0)


def _distinct_heads(scales: torch.Tensor, vllm_config: Any) -> list[float]:
    """Flatten ``[ranks, heads]`` to one scale per kv head of the model."""
    ranks, own = scales.shape
    total = vllm_config.model_config.get_total_num_kv_heads()
    replicas = ranks // total if own == 1 and 1 <= total < ranks else 1
    return [float(x) for x in scales[::replicas].flatten()]


def _report(result: dict[str, dict[str, list[float]]], vllm_config: Any) -> None:
    """Log the scales, and write them where that is asked for; on one rank."""
    from vllm.logger import init_logger

    if _tp_rank() or vllm_config.parallel_config.data_parallel_rank:
        return
    lines = (
        f"  {layer}: k {_short(scales['k_scale'])}, v {_short(scales['v_scale'])}"
        for layer, scales in result.items()
    )
    logger = init_logger(f"vllm.{__name__}")
    logger.info("kvq: scales measured at start-up:\n%s", "\n".join(lines))
    path = KVQConfig.parse(vllm_config.additional_config).scales_out
    if path is None:
        return
    content = {"type": FP8_DTYPES[vllm_config.cache_config.cache_dtype], "layers": result}
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    logger.info("kvq: scales written to %s.", path)


def _short(scales: list[float]) -> str:
    return " ".join(f"{scale:.4g}" for scale in scales)
