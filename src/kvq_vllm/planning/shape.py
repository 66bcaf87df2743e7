"""What a model's configuration says about the size of its cache and of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_vllm.errors import KVQError
from kvq_vllm.reading import read_config, read_json

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_STATE_LAYERS = ("linear", "mamba", "ssm", "conv", "recurrent", "gated_delta", "kda")
"""Parts of the names of layer types that keep a state of fixed size instead of a cache."""
_BOTH = "hybrid"
"""Layer type of attention with a Mamba layer at its side."""
_NEITHER = ("mlp", "moe")
_MIXED_LAYERS = (
    *("full_attention_interval", "attn_layer_period", "attn_layer_indices", "full_attn_idxs"),
    *("hybrid_override_pattern", "mamba_d_state", "ssm_cfg"),
)
"""Fields of models with such layers, which may not say which layers these are."""
_WITHOUT_CACHE = re.compile(r"bert|^mamba2?$|^rwkv")
"""Types of models that keep no KV cache, whatever their task."""
_WEIGHT_FILES = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
_MAX_LAYERS, _MAX_HEADS, _MAX_WIDTH, _MAX_TOKENS = 10_000, 10_000, 1_000_000, 1 << 32
_MAX_WEIGHT_BYTES = 1 << 60
_LIMITS = {  # name of a field: its smallest and its largest value
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), (1, _MAX_LAYERS)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), (1, _MAX_HEADS)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1, _MAX_HEADS)),
    "num_global_key_value_heads": (1, _MAX_HEADS),
    **dict.fromkeys(("hidden_size", "n_embd"), (1, _MAX_WIDTH)),
    **dict.fromkeys(("head_dim", "attention_head_dim"), (1, _MAX_WIDTH)),
    **dict.fromkeys(("global_head_dim", "v_head_dim"), (1, _MAX_WIDTH)),
    **dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "num_kv_shared_layers"), (0, _MAX_WIDTH)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (0, _MAX_WIDTH)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (0, _MAX_TOKENS)),
    "vocab_size": (1, _MAX_TOKENS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, _MAX_TOKENS)),
    **dict.fromkeys(("max_sequence_length", "seq_length"), (1, _MAX_TOKENS)),
    **dict.fromkeys(("attention_chunk_size", "sliding_window_pattern"), (1, _MAX_TOKENS)),
    "sliding_window": (0, _MAX_TOKENS),
    # Of Mamba layers.
    **dict.fromkeys(("mamba_d_ssm", "mamba_expand", "mamba_head_dim"), (1, _MAX_WIDTH)),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), (1, _MAX_WIDTH)),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel"), (1, _MAX_WIDTH)),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), (1, _MAX_HEADS)),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), (1, _MAX_HEADS)),
}
"""Far beyond any model. What is larger is a mistake or worse, and would only exhaust memory."""
_BITS_OF_METHOD = {"fp8": 8, "awq": 4, "gptq": 4, "mxfp4": 4, "bitsandbytes": 4, "nvfp4": 4}


@dataclass(frozen=True)
class LayerShape:
    """One attention layer, as far as its cache depends on it.

    Attributes:
        num_kv_heads: heads of keys and values, over all devices.
        head_size: elements of a key.
        value_size: elements of a value; 0 where one latent vector stands for both (MLA).
        sliding_window: positions that a query sees, or None for all.

    """

    num_kv_heads: int
    head_size: int
    value_size: int
    sliding_window: int | None = None


@dataclass(frozen=True)
class StateShape:
    """What one Mamba layer keeps of a request, whatever its length.

    Attributes:
        num_channels: heads times their size, over all devices.
        num_groups: of heads with the same input and output vectors; 0 in Mamba 1.
        state_size: numbers per channel, and elements of such a vector.
        conv_width: tokens that the convolution sees.
        dtype: of the numbers per channel, or None for that of the model.

    """

    num_channels: int
    num_groups: int
    state_size: int
    conv_width: int
    dtype: str | None = None

    @property
    def per_request(self) -> int:
        """States that vLLM keeps room for with prefix caching, its default.

        One to read and one to write; Mamba 2 also keeps one from inside a prefill.
        """
        return 3 if self.num_groups else 2

    def num_bytes(self, dtype: str, devices: int) -> int:
        """Bytes on one of `devices`; groups that are fewer are replicated."""
        groups = self.num_groups and max(1, self.num_groups // devices)
        channels = self.num_channels // devices
        convolved = channels + 2 * groups * self.state_size
        return (self.conv_width - 1) * convolved * DTYPE_BYTES[dtype] + (
            channels * self.state_size * DTYPE_BYTES[self.dtype or dtype]
        )


@dataclass(frozen=True)
class ModelShape:
    """A model, as far as its memory depends on it.

    Attributes:
        name: what to call it.
        layers: the layers that keep a cache.
        num_heads: query heads, over all devices.
        max_context: positions that the model was made for.
        dtype: of the unquantised cache: bfloat16, float16 or float32.
        weight_bytes: over all devices, or None where nothing tells.
        weight_bits: of most of the weights.
        weights_from: "files", "estimate" or "option".
        unsupported: why a kvq cache does not serve it, or None.
        state_layers: one number per layer that keeps a state of fixed size (Mamba, linear
            attention): how many of `layers` come before it.
        state: what each of those keeps, or None where the formula does not know.
        config_path: the ``config.json`` that it was read from.
        notes: what the figures leave out.

    """

    name: str
    layers: tuple[LayerShape, ...]
    num_heads: int
    max_context: int
    dtype: str
    weight_bytes: int | None
    weight_bits: int = 16
    weights_from: str = "estimate"
    unsupported: str | None = None
    state_layers: tuple[int, ...] = ()
    state: StateShape | None = None
    config_path: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_mla(self) -> bool:
        return any(layer.value_size == 0 for layer in self.layers)

    @property
    def needs_formula(self) -> bool:
        """Whether vLLM cannot be asked: it has to read what a state is from the ``config.json``."""
        return self.is_mla or (bool(self.state_layers) and self.config_path is None)

    @property
    def in_order(self) -> list[LayerShape | None]:
        """All layers in the order of the model; None is one that keeps a state."""
        order: list[LayerShape | None] = []
        for index, layer in enumerate((*self.layers, None)):
            order += [None] * self.state_layers.count(index)
            order += [layer] if layer else []
        return order

    @property
    def num_windowed(self) -> int:
        return sum(layer.sliding_window is not None for layer in self.layers)


def read_model(model: str | Path) -> ModelShape:
    """Read a model's shape.

    Args:
        model: a Hugging Face folder, a ``config.json``, or a name that is in the local hub cache.

    Raises:
        KVQError: there is no such model, its configuration lacks something, or it keeps no
            KV cache that could be planned.

    """
    path = _find_config(str(model))
    config = read_config(path)
    name = path.resolve().parent.name if Path(model).expanduser().exists() else str(model)
    try:
        return _shape(name, path, config)
    except (AttributeError, TypeError, ValueError) as error:  # such as a number in a list's place
        raise KVQError(f"{path} is malformed ({error}): give a valid config.json.") from None


def check_size(what: str, name: str, value: Any) -> None:
    """Refuse a size that no model has.

    Args:
        what: file or option that it comes from.
        name: of the field in a config.json.
        value: of any type; None is a field that is not set.

    Raises:
        KVQError: it is no whole number in the field's limits.

    """
    low, high = _LIMITS[name]
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise KVQError(
            f"{what} is {str(value)[:40]} but must be a whole number from {low} to {high}: "
            "correct it, or describe the model with --layers and its siblings."
        )


def _find_config(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        raise KVQError(f"{model} has no config.json: give a model in Hugging Face's format.")
    if path.is_file():
        return path
    if cached := _cached(model):
        return cached
    raise KVQError(
        f"{model} is neither a folder with a config.json, nor such a file, nor a model in the "
        "local hub cache: check the path, or fetch the model with `hf download`."
    )


def _cached(name: str) -> Path | None:
    """Return the config.json of a model in the local hub cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


class _Fields:
    """A configuration's fields: from config.json, and from transformers where that is not enough.

    transformers knows the defaults of every model, but importing it takes seconds.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = _text_config(config)
        for name in _LIMITS:
            check_size(f"{path}: {name}", name, self.raw.get(name))
        self.notes: list[str] = []
        self._defaults = None if _is_complete(self.raw) else self._ask_transformers()

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first field that is set, under any of its names."""
        for name in names:
            if (value := self.raw.get(name)) is not None:
                return value
        for name in names:
            if (value := getattr(self._defaults, name, None)) is not None:
                return value
        return default

    def need(self, *names: str, option: str) -> Any:
        """As :meth:`get`, for what cannot be done without.

        Raises:
            KVQError: it is not set.

        """
        value = self.get(*names)
        if value is None:
            raise KVQError(
                f"{self.path} does not say {names[0]}: describe the model with {option} and its "
                "siblings instead, or use a transformers release that knows it."
            )
        return value

    def _ask_transformers(self) -> Any:
        try:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
            return config.get_text_config()
        except ImportError:
            self.notes.append(
                "transformers is not installed: defaults that config.json leaves out are guessed"
            )
        except Exception as error:  # whatever a model's own code raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.notes.append(f"transformers cannot read this configuration ({reason[:120]})")
        return None


def _is_complete(raw: Mapping[str, Any]) -> bool:
    """Whether config.json says by itself what every layer keeps."""
    if raw.get("kv_lora_rank"):
        return True
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    if any(raw.get(name) is None for name in sizes):
        return False
    if raw.get("layer_types") or raw.get("layers_block_type"):
        return True
    mixed = (*_MIXED_LAYERS, "sliding_window") if _uses_window(raw) else _MIXED_LAYERS
    return not any(raw.get(name) for name in mixed)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a multimodal configuration that describes the language model."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(inner := config.get(key), dict):
            # Some fields, such as torch_dtype, may be outside only.
            return dict(config) | dict(_text_config(inner))
    return config


def _shape(name: str, path: Path, config: Mapping[str, Any]) -> ModelShape:
    fields = _Fields(path, config)
    architecture = next(iter(config.get("architectures") or ()), "")
    if config.get("is_encoder_decoder"):
        raise KVQError(
            f"{name} is an encoder-decoder model, whose cross attention `kvq plan` does not "
            "count: use --kv-cache-dtype auto for it."
        )
    kind = str(config.get("model_type", ""))
    classifies = architecture.endswith(("ForMaskedLM", "ForSequenceClassification"))
    if classifies or _WITHOUT_CACHE.search(kind):
        raise KVQError(
            f"{name} ({architecture or kind}) keeps no KV cache, so there is nothing to plan: "
            "give a model that generates text."
        )
    layers, state_layers, unsupported = _layers(name, fields)
    weight_bytes, weights_from = _weight_files(path.parent), "files"
    bits = _weight_bits(fields)
    if weight_bytes is None and not (fields.get("kv_lora_rank") or state_layers):
        weight_bytes, weights_from = _estimate_weights(fields, bits), "estimate"
    dtype = str(fields.get("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch.")
    if dtype != "float16":  # vLLM, too, serves float32 checkpoints in 16 bit unless told
        dtype = "bfloat16"
    return ModelShape(
        name=name,
        layers=layers,
        num_heads=_heads(fields),
        max_context=int(
            fields.get("max_position_embeddings", "n_positions", "max_sequence_length")
            or fields.get("seq_length", default=8192)
        ),
        dtype=dtype,
        weight_bytes=weight_bytes,
        weight_bits=bits,
        weights_from=weights_from,
        unsupported=unsupported,
        state_layers=state_layers,
        state=_state(fields) if state_layers else None,
        config_path=path,
        notes=tuple(fields.notes),
    )


def _heads(fields: _Fields) -> int:
    return int(fields.need("num_attention_heads", "n_head", "num_heads", option="--heads"))


def _layers(
    name: str, fields: _Fields
) -> tuple[tuple[LayerShape, ...], tuple[int, ...], str | None]:
    """Return the layers with a cache, where those with a state are, and why kvq serves neither."""
    num_layers = int(fields.need("num_hidden_layers", "n_layer", "num_layers", option="--layers"))
    if latent := fields.get("kv_lora_rank"):
        rope = fields.need("qk_rope_head_dim", option="--head-size")
        reason = (
            "multi-head latent attention (MLA) keeps one small latent vector per token in place "
            "of keys and values, which vLLM stores itself, in 16 bit or fp8"
        )
        return (LayerShape(1, int(latent) + int(rope), 0),) * num_layers, (), reason
    heads = _heads(fields)
    head_size = int(
        fields.get("head_dim", "attention_head_dim")
        or fields.need("hidden_size", "n_embd", option="--head-size") // heads
    )
    value_size = int(fields.raw.get("v_head_dim") or head_size)
    kv_heads = int(fields.get("num_key_value_heads", "num_kv_heads", default=heads))
    if fields.raw.get("multi_query") and not fields.raw.get("new_decoder_architecture"):
        kv_heads = 1  # Falcon and StarCoder
    window = fields.get("sliding_window") if _uses_window(fields.raw) else None
    unsupported = None
    if value_size != head_size:
        unsupported = "its values have another head size than its keys"
    if fields.get("attention_chunk_size"):
        unsupported = "its layers use chunked local attention"

    kinds = _layer_types(fields, num_layers, window)
    shared = int(fields.raw.get("num_kv_shared_layers") or 0)
    kinds = kinds[: num_layers - shared]  # the others read these layers' caches
    # Gemma 4: layers that see everything have sizes of their own.
    global_size = int(fields.get("global_head_dim", default=head_size))
    global_kv_heads = kv_heads
    if fields.get("attention_k_eq_v"):
        global_kv_heads = int(fields.get("num_global_key_value_heads", default=kv_heads))
    full = LayerShape(kv_heads, head_size, value_size)
    if global_size != head_size or global_kv_heads != kv_heads:
        full = LayerShape(global_kv_heads, global_size, global_size)
    layers, states = [], []
    for kind in kinds:
        keeps_state = kind == _BOTH or any(part in kind for part in _STATE_LAYERS)
        if "sliding" in kind or kind == "local":
            layers.append(LayerShape(kv_heads, head_size, value_size, window))
        elif "chunked" in kind:
            layers.append(
                LayerShape(kv_heads, head_size, value_size, fields.get("attention_chunk_size"))
            )
        elif kind == _BOTH or not (keeps_state or kind in _NEITHER):
            layers.append(full)
        if keeps_state:
            states.append(len(layers))
    if not layers:
        raise KVQError(
            f"{name} has no attention layers, so it keeps no KV cache to plan: give a model with "
            "attention."
        )
    return tuple(layers), tuple(states), unsupported


def _state(fields: _Fields) -> StateShape | None:
    """Return the state of Mamba layers, or None where the configuration tells of other layers.

    As vLLM reads Granite 4, Bamba, Falcon-H1, Nemotron-H, Zamba 2 and Jamba, which has Mamba 1.
    """

    def size(*names: str) -> int | None:
        value: int | None = fields.get(*names)
        check_size(f"{fields.path}: {names[0]}", names[0], value)
        return value

    heads = size("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    head_size, hidden = size("mamba_head_dim"), size("hidden_size")
    expand = size("mamba_expand")
    num_channels = size("mamba_d_ssm")
    if not num_channels and heads and head_size:
        num_channels = heads * head_size
    elif not num_channels and expand and hidden:
        num_channels = expand * hidden
    num_groups = size("mamba_n_groups", "n_groups", "mamba_ngroups") if heads else 0
    state_size = size("mamba_d_state", "ssm_state_size")
    conv_width = size("mamba_d_conv", "conv_kernel")
    if num_channels is None or num_groups is None or state_size is None or conv_width is None:
        return None
    dtype = fields.get("mamba_ssm_cache_dtype")
    return StateShape(
        num_channels,
        num_groups,
        state_size,
        conv_width,
        dtype if dtype in DTYPE_BYTES else None,
    )


def _uses_window(raw: Mapping[str, Any]) -> bool:
    return raw.get("use_sliding_window", True) is not False


def _layer_types(fields: _Fields, num_layers: int, window: int | None) -> list[str]:
    """Return one kind per layer, in the words of transformers.

    Raises:
        KVQError: layers differ, and nothing says how.

    """
    if types := fields.get("layer_types", "layers_block_type"):
        if len(types) > _MAX_LAYERS:
            raise ValueError(f"{len(types)} layer types")
        return [str(kind) for kind in types]
    if any(fields.get(name) for name in _MIXED_LAYERS):
        raise KVQError(
            f"{fields.path} mixes attention with other layers and does not say which is which: "
            "use a transformers release that knows the model."
        )
    if not window:
        return ["full_attention"] * num_layers
    if pattern := fields.get("sliding_window_pattern"):
        return [
            "full_attention" if (i + 1) % int(pattern) == 0 else "sliding_attention"
            for i in range(num_layers)
        ]
    return ["sliding_attention"] * num_layers


# --- weights ---------------------------------------------------------------------------------


def _weight_files(folder: Path) -> int | None:
    """Return the size of a model's weight files, or None where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            size = read_json(index)["metadata"]["total_size"]
            if 0 < size < _MAX_WEIGHT_BYTES:
                return int(size)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # some indices have no metadata: add up the files instead
    for pattern in _WEIGHT_FILES:
        if files := list(folder.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return None


def _weight_bits(fields: _Fields) -> int:
    """Return the bits of most weights, from the checkpoint's quantisation."""
    config = fields.raw.get("quantization_config") or fields.raw.get("compression_config")
    if not isinstance(config, dict):
        dtype = str(fields.get("dtype", "torch_dtype", default="bfloat16"))
        return 8 * DTYPE_BYTES.get(dtype.removeprefix("torch."), 2)
    if isinstance(config.get("bits"), int):
        return int(config["bits"])
    for group in (config.get("config_groups") or {}).values():
        if isinstance(bits := (group.get("weights") or {}).get("num_bits"), int):
            return bits
    if config.get("load_in_8bit"):
        return 8
    return _BITS_OF_METHOD.get(str(config.get("quant_method")), 8)


def _estimate_weights(fields: _Fields, bits: int) -> int | None:
    """Return the bytes of a decoder's weights by its sizes: within a few percent."""
    hidden = fields.get("hidden_size", "n_embd")
    vocabulary = fields.get("vocab_size")
    heads = _heads(fields)
    if hidden is None or vocabulary is None:
        return None
    num_layers = int(fields.get("num_hidden_layers", "n_layer", "num_layers"))
    head_size = int(fields.get("head_dim") or hidden // heads)
    kv_heads = int(fields.get("num_key_value_heads", "num_kv_heads", default=heads))
    attention = 2 * hidden * head_size * (heads + kv_heads)
    intermediate = int(fields.get("intermediate_size", "n_inner", default=4 * hidden))
    experts = int(fields.get("num_local_experts", "num_experts", "n_routed_experts", default=0))
    if experts:
        expert = int(fields.get("moe_intermediate_size", default=intermediate))
        feed_forward = 3 * hidden * expert * experts + hidden * experts
        feed_forward += 3 * hidden * int(fields.get("shared_expert_intermediate_size", default=0))
    else:
        feed_forward = 3 * hidden * intermediate
    embeddings = hidden * vocabulary * (1 if fields.get("tie_word_embeddings") else 2)
    # Embeddings and norms stay at 16 bit where weights are quantised.
    return num_layers * (attention + feed_forward) * bits // 8 + embeddings * max(2, bits // 8)
