"""vLLM's own planning of a model's cache, without weights or memory.

It runs in a process of its own, started by :func:`ask`, because making an engine's configuration
sets environment variables and global state, and logs. There, real attention layers of the model's
sizes are made and asked for their cache specs, which go through vLLM's planner.
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
from pathlib import Path
from typing import Any

from kvq_kernels.formats import SCHEMES
from kvq_vllm.config import UNIT_KEYS
from kvq_vllm.planning.formula import Sizes
from kvq_vllm.planning.shape import LayerShape, ModelShape

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class EnginePlan:
    """What vLLM plans for one cache dtype.

    Attributes:
        num_blocks: blocks of the cache.
        block_size: tokens per block, of the layers that see everything.
        in_flight_tokens: that vLLM reserves room for beside a sliding window.
        concurrency: context to requests of that many tokens, as vLLM reports it.
        problem: why there is no plan, in vLLM's words, or None.

    """

    num_blocks: int = 0
    block_size: int = 0
    in_flight_tokens: int = 0
    concurrency: dict[int, float] | None = None
    problem: str | None = None


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
        "layers": [asdict(layer) for layer in shape.layers],
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
    return lines[-1] if lines else "vLLM ended without a word"


# --- in the child ----------------------------------------------------------------------------


def _answer(question: dict[str, Any]) -> dict[str, EnginePlan]:
    layers = [LayerShape(**layer) for layer in question.pop("layers")]
    plans = {}
    for name in question.pop("cache_dtypes"):
        try:
            plans[name] = _plan(name, layers, **question)
        except Exception as error:  # whatever vLLM raises is the answer
            plans[name] = EnginePlan(problem=_last_line(str(error)) or type(error).__name__)
    return plans


def _plan(
    cache_dtype: str,
    layers: Sequence[LayerShape],
    dtype: str,
    tensor_parallel_size: int,
    additional_config: dict[str, Any],
    contexts: Sequence[int],
    memory: int,
    max_num_batched_tokens: int | None,
) -> EnginePlan:
    from vllm.v1.core import kv_cache_utils

    vllm_config = engine_config(
        layers, dtype, cache_dtype, additional_config, contexts, max_num_batched_tokens
    )
    made = make_layers(vllm_config, layers, dtype, tensor_parallel_size)
    specs = _layer_specs(vllm_config, made)
    config = cache_config(vllm_config, specs, memory)
    concurrency = {}
    for context in contexts:
        vllm_config.model_config.max_model_len = context
        _, concurrency[context] = kv_cache_utils.get_kv_cache_capacity(vllm_config, config)
    return EnginePlan(
        num_blocks=config.num_blocks,
        block_size=vllm_config.cache_config.block_size,
        in_flight_tokens=vllm_config.max_in_flight_tokens,
        concurrency=concurrency,
    )


def engine_config(
    layers: Sequence[LayerShape],
    dtype: str,
    cache_dtype: str,
    additional_config: dict[str, Any],
    contexts: Sequence[int],
    max_num_batched_tokens: int | None,
) -> Any:
    """Return the configuration of a server, for a plain decoder of this size."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    first = layers[0]
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": first.num_kv_heads * first.head_size,
            "intermediate_size": 256,
            "num_hidden_layers": len(layers),
            "num_attention_heads": first.num_kv_heads,
            "num_key_value_heads": first.num_kv_heads,
            "head_dim": first.head_size,
            "max_position_embeddings": contexts[-1],
            "vocab_size": 1024,
            "dtype": dtype,
        }
        Path(folder, "config.json").write_text(json.dumps(config))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            kv_cache_dtype=cache_dtype,
            # The planner refuses what does not fit even once; that is for the caller to say.
            max_model_len=contexts[0],
            max_num_batched_tokens=max_num_batched_tokens,
            additional_config=additional_config if cache_dtype in SCHEMES else {},
        ).create_engine_config(UsageContext.OPENAI_API_SERVER)


def make_layers(
    vllm_config: Any, layers: Sequence[LayerShape], dtype: str, tensor_parallel_size: int
) -> dict[str, Any]:
    """Make the attention layers of one device; return them by name, companions included."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    torch.set_default_dtype(getattr(torch, dtype))
    with set_current_vllm_config(vllm_config):
        made = []
        for index, layer in enumerate(layers):
            heads = max(1, layer.num_kv_heads // tensor_parallel_size)
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
    layers_by_name: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return layers_by_name


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
