"""Checkpoints made of the tiny Llama: with KV cache scales, and with quantised weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_LLM_COMPRESSOR = Path(__file__).parents[1] / "data" / "llm_compressor_smollm2.json"
KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def edited(
    model: Path,
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Copy a checkpoint, with tensors added or replaced and entries of config.json set."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors") | dict(tensors or {})
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def perturbed(model: Path, folder: Path, amount: float) -> Path:
    """Copy a checkpoint with noise of `amount` standard deviations added to its matrices."""
    generator = torch.Generator().manual_seed(0)
    matrices = {n: w for n, w in load_file(model / "model.safetensors").items() if w.dim() == 2}
    noise = {n: torch.randn(w.shape, generator=generator) for n, w in matrices.items()}
    return edited(model, folder, {n: w + amount * w.std() * noise[n] for n, w in matrices.items()})


def with_scales(
    model: Path, folder: Path, scales: Mapping[str, torch.Tensor], strategy: str
) -> Path:
    """Add KV cache scales as llm-compressor writes them.

    Args:
        model: folder of the plain checkpoint.
        folder: of the new one.
        scales: such as ``{"0.self_attn.k_scale": tensor}``.
        strategy: "tensor" or "attn_head".

    """
    return edited(
        model,
        folder,
        {f"model.layers.{name}": scale for name, scale in scales.items()},
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "frozen",
            "config_groups": {},
            "kv_cache_scheme": KV_SCHEME | {"strategy": strategy},
        },
    )


def of_llm_compressor(model: Path, folder: Path, strategy: str) -> tuple[Path, torch.Tensor]:
    """Rebuild a checkpoint that ``examples/calibrate_fp8`` wrote for SmolLM2.

    Its weights are the model's own; its scales and its ``quantization_config`` lie in tests/data.

    Returns:
        the folder, and the scales ``[layer, key or value, 1 or kv heads]``.

    """
    written = json.loads(_LLM_COMPRESSOR.read_text())[strategy]
    scales = {
        name: torch.tensor(scale).view(written["shape"])
        for name, scale in written["scales"].items()
    }
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = written["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(scales, folder / "scales.safetensors")
    layers = config["num_hidden_layers"]
    table = [
        torch.stack([scales[f"model.layers.{i}.self_attn.{n}_scale"].flatten() for n in "kv"])
        for i in range(layers)
    ]
    return folder, torch.stack(table)


def with_int4_weights(model: Path, folder: Path, group_size: int = 32) -> Path:
    """Quantise the linear layers to 4 bits, packed as compressed-tensors does."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    weights = load_file(model / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _linear(weights):
        groups = weight.unflatten(1, (-1, group_size))
        scale = groups.abs().amax(-1, keepdim=True) / 7.5
        codes = (groups / scale).round().clamp(-8, 7).to(torch.int8).flatten(1)
        tensors[f"{name}_packed"] = pack_to_int32(codes, 4)
        tensors[f"{name}_scale"] = scale.squeeze(-1)
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
    args = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
    }
    return _with_weights(model, folder, tensors, "pack-quantized", args, None)


def with_fp8_weights(model: Path, folder: Path) -> Path:
    """Quantise the linear layers to fp8 per channel, activations per token."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _linear(load_file(model / "model.safetensors")):
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    return _with_weights(
        model,
        folder,
        tensors,
        "float-quantized",
        fp8 | {"strategy": "channel"},
        fp8 | {"strategy": "token", "dynamic": True},
    )


def _linear(weights: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight) for name, weight in weights.items() if name.endswith("_proj.weight")]


def _with_weights(
    model: Path,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    form: str,
    weights: dict[str, Any],
    activations: dict[str, Any] | None,
) -> Path:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    edited(
        model,
        folder,
        tensors,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    )
    kept = load_file(folder / "model.safetensors")
    for name, _ in _linear(kept):
        if f"{name}_packed" in kept:
            del kept[name]
    save_file(kept, folder / "model.safetensors")
    return folder
