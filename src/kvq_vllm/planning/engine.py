"""vLLM's own planning of a model's cache, without weights or memory.

It runs in a process of its own, started by :func:`ask`, because making an engine's configuration
sets environment variables and global state, and logs. There, real attention layers of the model's
sizes are made and asked for their cache specs, which go through vLLM's planner. The configuration
is that of a plain decoder, but for models that mix attention with layers that keep a state: what
these keep, only vLLM's class of the model knows, from the model's own ``config.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from inspect import isabstract
from pathlib import Path
from textwrap import shorten
from typing import Any

from kvq_kernels.formats import SCHEMES
from kvq_vllm.config import UNIT_KEYS, KVQConfigError
from kvq_vllm.planning.formula import Sizes
from kvq_vllm.planning.shape import LayerShape, ModelShape
from kvq_vllm.reading import read_config

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class EnginePlan:
    """What vLLM plans for one cache dtype.

    Attributes:
        num_blocks: blocks of the cache.
        block_size: tokens per block, of the layers that see everything.
        ring_bytes: of a request's unquantised newest tokens.
        state_bytes: of a request, in layers that keep a state of fixed size.
        in_flight_tokens: that vLLM reserves room for beside a sliding window.
        concurrency: context to requests of that many tokens, as vLLM reports it.
        problem: why there is no plan, in vLLM's words, or None.
        refused: whether the problem is that this plugin does not serve the model.

    """

    num_blocks: int = 0
    block_size: int = 0
    ring_bytes: int = 0
    state_bytes: int = 0
    in_flight_tokens: int = 0
    concurrency: dict[int, float] | None = None
    problem: str | None = None
    refused: bool = False


def is_available() -> bool:
    """Whether vLLM is installed."""
    return find_spec("vllm") is not None


def ask(
    shape: ModelShape,
    cache_dtypes: Sequence[str],
    sizes: Sizes,
    contexts: Sequence[int],
    memory: int,
    max_num_batched_tokens: int | None = None,
) -> dict[str, EnginePlan]:
    """Ask vLLM in a fresh process.

    Args:
        shape: the model.
        cache_dtypes: values of ``--kv-cache-dtype``.
        sizes: how it is served.
        contexts: tokens per request.
        memory: bytes of cache on one device.
        max_num_batched_tokens: of vLLM's option; None leaves it to vLLM.

    Returns:
        Cache dtype to plan; one with a problem where vLLM could not plan.

    """
    question = {
        "layers": [asdict(layer) if layer else None for layer in shape.in_order],
        "config_path": str(shape.config_path) if shape.state_layers else None,
        "dtype": shape.dtype,
        "cache_dtypes": list(cache_dtypes),
        "tensor_parallel_size": sizes.tensor_parallel_size,
        "additional_config": {
            "kvq": sizes.config.model_dump(include=set(UNIT_KEYS), exclude_none=True)
        },
        "contexts": sorted(contexts),
        "memory": memory,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    environment = os.environ | {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        try:
            child = subprocess.run(
                [sys.executable, "-m", __name__, answer.name],
                input=json.dumps(question),
                capture_output=True,
                text=True,
                env=environment,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
            problem = _last_line(child.stderr)
        except subprocess.TimeoutExpired:
            problem = f"vLLM did not answer within {TIMEOUT_SECONDS} s"
        with suppress(ValueError):
            return {
                name: EnginePlan(
                    **plan | {"concurrency": {int(c): n for c, n in plan["concurrency"].items()}}
                    if plan["concurrency"]
                    else plan
                )
                for name, plan in json.load(answer).items()
            }
    return {name: EnginePlan(problem=problem) for name in cache_dtypes}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return shorten(lines[-1], 240) if lines else "vLLM ended without a word"


# --- in the child ----------------------------------------------------------------------------


def _answer(question: dict[str, Any]) -> dict[str, EnginePlan]:
    layers = [LayerShape(**layer) if layer else None for layer in question.pop("layers")]
    plans = {}
    for name in question.pop("cache_dtypes"):
        try:
            plans[name] = _plan(name, layers, **question)
        except KVQConfigError as error:
            # Of a stand-in, it is about this machine: the formula's figures stand.
            refused = question["config_path"] is not None
            plans[name] = EnginePlan(problem=str(error).rstrip("."), refused=refused)
        except Exception as error:  # whatever vLLM raises is the answer
            plans[name] = EnginePlan(problem=_words(error))
    return plans


def _words(error: Exception) -> str:
    """Return an error's last line, without what pydantic puts around it."""
    if callable(details := getattr(error, "errors", None)):
        with suppress(Exception):
            return _last_line(details()[0]["msg"]).removeprefix("Value error, ")
    return _last_line(str(error) or type(error).__name__)


def _plan(
    cache_dtype: str,
    layers: Sequence[LayerShape | None],
    config_path: str | None,
    dtype: str,
    tensor_parallel_size: int,
    additional_config: dict[str, Any],
    contexts: Sequence[int],
    memory: int,
    max_num_batched_tokens: int | None,
) -> EnginePlan:
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MambaSpec

    from kvq_vllm.residual import LAYER_SUFFIX

    model = _own_config(config_path) if config_path else plain_decoder(layers, contexts[-1])
    vllm_config = engine_config(
        model, dtype, cache_dtype, additional_config, contexts[0], max_num_batched_tokens
    )
    vllm_config.parallel_config.tensor_parallel_size = tensor_parallel_size
    if config_path:
        _check_heads(vllm_config, layers)
    made = make_layers(vllm_config, layers, dtype)
    specs = _layer_specs(vllm_config, made)
    config = cache_config(vllm_config, specs, memory)
    concurrency = {}
    for context in contexts:
        vllm_config.model_config.max_model_len = context
        _, concurrency[context] = kv_cache_utils.get_kv_cache_capacity(vllm_config, config)
    sizes = {name: spec.max_memory_usage_bytes(vllm_config) for name, spec in specs.items()}
    return EnginePlan(
        num_blocks=config.num_blocks,
        block_size=vllm_config.cache_config.block_size,
        ring_bytes=sum(size for name, size in sizes.items() if name.endswith(LAYER_SUFFIX)),
        state_bytes=sum(size for name, size in sizes.items() if isinstance(specs[name], MambaSpec)),
        in_flight_tokens=vllm_config.max_in_flight_tokens,
        concurrency=concurrency,
    )


def _own_config(path: str) -> dict[str, Any]:
    """Return a model's configuration, without what has no part in its cache.

    Weights may be quantised in a way that this machine has no kernels for, and code that a
    checkpoint brings is never run.
    """
    left_out = ("quantization_config", "compression_config", "auto_map")
    return {key: value for key, value in read_config(Path(path)).items() if key not in left_out}


def _check_heads(vllm_config: Any, layers: Sequence[LayerShape | None]) -> None:
    """Check that vLLM, which sizes blocks by its own reading, reads the attention layers we read.

    Raises:
        ValueError: it does not.

    """
    config = vllm_config.model_config
    theirs = config.get_total_num_kv_heads(), config.get_head_size()
    ours = {(layer.num_kv_heads, layer.head_size) for layer in layers if layer}
    if ours != {theirs}:
        raise ValueError(f"vLLM reads kv heads and head size {theirs}, kvq plan {sorted(ours)}")


def plain_decoder(layers: Sequence[LayerShape | None], max_context: int) -> dict[str, Any]:
    """Return the configuration of a decoder with layers as the first of `layers`."""
    first = next(layer for layer in layers if layer)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": first.num_kv_heads * first.head_size,
        "intermediate_size": 256,
        "num_hidden_layers": len(layers),
        "num_attention_heads": first.num_kv_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_size,
        "max_position_embeddings": max_context,
        "vocab_size": 1024,
    }


def engine_config(
    model: dict[str, Any],
    dtype: str,
    cache_dtype: str,
    additional_config: dict[str, Any],
    max_model_len: int,
    max_num_batched_tokens: int | None,
) -> Any:
    """Return the configuration of a server, for a ``config.json`` that holds `model`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            kv_cache_dtype=cache_dtype,
            # The planner refuses what does not fit even once; that is for the caller to say.
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            additional_config=additional_config if cache_dtype in SCHEMES else {},
        ).create_engine_config(UsageContext.OPENAI_API_SERVER)


def make_layers(
    vllm_config: Any, layers: Sequence[LayerShape | None], dtype: str
) -> dict[str, Any]:
    """Make the layers of one device; return them by name, companions included."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    torch.set_default_dtype(getattr(torch, dtype))
    layers_by_name: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    devices = vllm_config.parallel_config.tensor_parallel_size
    state_layer = _state_layer(vllm_config) if None in layers else None
    with set_current_vllm_config(vllm_config):
        made = []
        for index, layer in enumerate(layers):
            if layer is None:
                layers_by_name[f"model.layers.{index}.mamba"] = state_layer
                continue
            heads = max(1, layer.num_kv_heads // devices)
            attention = Attention(
                num_heads=heads,
                head_size=layer.head_size,
                scale=1.0,
                num_kv_heads=heads,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=layer.sliding_window,
                prefix=f"model.layers.{index}.self_attn.attn",
            )
            made.append(attention)
        # As in an engine, companions come after all layers: the planner looks at the order.
        for attention in made:
            attention.process_weights_after_loading(attention.dtype)
    return layers_by_name


def _state_layer(vllm_config: Any) -> Any:
    """Return a layer that keeps the state that vLLM's class of the model describes.

    Raises:
        NotImplementedError: vLLM has no such class, or it has layers with different states.

    """
    import torch
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.models import ModelRegistry

    config = vllm_config.model_config
    name = ", ".join(config.architectures)
    if not config.is_hybrid:  # or it is unknown: vLLM then takes transformers' class
        raise NotImplementedError(f"no layers of {name} keep a state in this version")
    model, _ = ModelRegistry.resolve_model_cls(config.architecture, model_config=config)
    # How many states a request has is up to the layer's class, and what a state is to the model's.
    classes = [
        value
        for value in vars(sys.modules[model.__module__]).values()
        if isinstance(value, type) and issubclass(value, MambaBase) and not isabstract(value)
    ]
    if len(classes) != 1 or hasattr(model, "get_mamba_specs_from_config"):
        raise NotImplementedError(f"vLLM's class of {name} does not tell of one kind of state")
    base: Any = classes[0]

    class StateLayer(base):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)  # without weights

        def get_state_shape(self) -> Any:
            return model.get_mamba_state_shape_from_config(vllm_config)

        def get_state_dtype(self) -> Any:
            return model.get_mamba_state_dtype_from_config(vllm_config)

    return StateLayer()


def _layer_specs(vllm_config: Any, layers: dict[str, Any]) -> dict[str, Any]:
    """Return what each layer wants of the cache, and settle its layout, as an engine does."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )

    backends = {name: layer.get_attn_backend() for name, layer in layers.items()}
    with set_current_vllm_config(vllm_config):
        current_platform.update_block_size_for_backend(vllm_config)
        specs = {
            name: backends[name].customize_spec(layer.get_kv_cache_spec(vllm_config))
            for name, layer in layers.items()
        }
    layouts = get_supported_kv_cache_layouts(dict.fromkeys(backends.values()))
    layout = resolve_kv_cache_layout(
        vllm_config, [[layout.name for layout in layouts]], list(specs.values())
    )
    vllm_config.cache_config.kv_cache_layout = layout.name
    return specs


def cache_config(vllm_config: Any, specs: dict[str, Any], memory: int) -> Any:
    """Return vLLM's cache configuration for one worker."""
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # vLLM 0.32
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(vllm_config, [specs], [memory])[0]
    groups = planning.get_global_kv_cache_groups(vllm_config, [specs])
    return planning.get_kv_cache_configs(vllm_config, [specs], [memory], groups)[0]


def main() -> None:
    plans = _answer(json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps({name: asdict(plan) for name, plan in plans.items()}))


if __name__ == "__main__":
    main()
