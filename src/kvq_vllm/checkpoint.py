"""KV cache scales in a checkpoint's files, looked at before anything loads.

vLLM's loaders stop in the middle with messages that name neither tensor nor file, or take a
negative scale for a missing one. The files' headers and a few numbers per layer tell in time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvq_vllm.config import KVQConfigError

_SCALE = re.compile(r"\.(?P<kind>[qkv]|kv)(?:_scale|_cache\.scale)$")
"""Tensor names that vLLM takes for KV cache scales, in whatever module they lie."""

WAY_OUT = (
    'calibrate the checkpoint again, or ignore its scales with additional_config {"kvq": '
    '{"scales": "warmup"}}'
)


def check_scales(model_config: Any) -> None:
    """Refuse a checkpoint in a local folder whose scales cannot be used.

    Checkpoints that vLLM has yet to download are checked as their layers load, by value only.

    Args:
        model_config: vLLM's, for the folder, the head counts and the quantisation scheme.

    Raises:
        KVQConfigError: a scale is not positive and finite, has a wrong length, or a layer has a
            key scale and no value scale; the message names the tensor and the file.

    """
    folder = Path(model_config.model)
    if not folder.is_dir():
        return
    per_head = _scheme(model_config.hf_config).get("strategy") == "attn_head"
    heads = model_config.get_total_num_kv_heads() if per_head else 1
    query_heads = model_config.hf_text_config.num_attention_heads if per_head else 1
    keys, values = {}, set()
    for file, name, kind, scale in _scales(folder, heads, query_heads):
        if not (scale.isfinite() & (scale > 0)).all():
            raise KVQConfigError(
                f"{file}: {name} is {scale.tolist()} but must be positive and finite: {WAY_OUT}."
            )
        if kind == "k":
            keys[_layer_of(name)] = (file, name)
        elif kind == "v":
            values.add(_layer_of(name))
    for layer, (file, name) in keys.items():
        if layer not in values:
            raise KVQConfigError(f"{file}: {name} has no counterpart for the values: {WAY_OUT}.")


def _scheme(hf_config: Any) -> dict[str, Any]:
    """Return the checkpoint's ``kv_cache_scheme``, empty where there is none."""
    quantisation = getattr(hf_config, "quantization_config", None) or {}
    return (quantisation.get("kv_cache_scheme") or {}) if isinstance(quantisation, dict) else {}


def _scales(
    folder: Path, heads: int, query_heads: int
) -> Iterator[tuple[Path, str, str, torch.Tensor]]:
    """Yield (file, tensor name, "k", "v" or "kv", scales as fp32 ``[heads]``).

    Those of queries are checked and left out, because queries are not quantised.
    """
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise KVQConfigError(
                f"{file} is no valid safetensors file ({error}): get the checkpoint again."
            ) from None
        with tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dict
                if match := _SCALE.search(name):
                    kind = match["kind"]
                    shape = tensors.get_slice(name).get_shape()  # before anything is read
                    _check_length(file, name, shape, query_heads if kind == "q" else heads)
                    if kind != "q":
                        yield file, name, kind, tensors.get_tensor(name).float().reshape(-1)


def _check_length(file: Path, name: str, shape: list[int], expected: int) -> None:
    if (length := math.prod(shape)) != expected:
        raise KVQConfigError(
            f"{file}: {name} has {length} scales, but the model and its quantization_config "
            f"need {expected}: {WAY_OUT}."
        )


def _layer_of(name: str) -> str:
    """Return the part of a tensor's name that its layer's key and value scales share."""
    parts = name.split(".")
    return ".".join(part for part in parts[:-1] if not part.startswith(("k_", "v_")))
