#!/usr/bin/env python3
"""How many tokens fit in the same cache memory, as vLLM itself reports it.

    python benchmarks/capacity.py [--json out.json]

Two kinds of rows: *engine* starts vLLM on a small 16-bit model with head size 128 for every
cache dtype and reads the capacity it logs; *planned* asks vLLM's planner, without weights or
memory, about the shape of an 8B model (32 layers, 8 kv heads, head size 128) on 20 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
DTYPES = ("auto", "kvq-fp8", "kvq-int8", "kvq-k8v4", "kvq-int4")
ENGINE_CONTEXT = 8192
PLANNED_CONTEXTS = (8192, 32768, 131072)
PLANNED_MEMORY = 20 * GIB


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, as far as its cache depends on them."""

    num_layers: int
    num_kv_heads: int
    head_size: int


SHAPE_8B = Shape(num_layers=32, num_kv_heads=8, head_size=128)
SHAPE_ENGINE = Shape(num_layers=2, num_kv_heads=8, head_size=128)


@dataclass(frozen=True)
class Capacity:
    """One row of the result.

    Attributes:
        how: "engine" or "planned".
        cache_dtype: value of ``--kv-cache-dtype``.
        max_model_len: context that each request is given.
        memory_bytes: size of the cache.
        tokens: capacity in tokens, as vLLM reports it.
        ratio: tokens over those of "auto" in the same rows.

    """

    how: str
    cache_dtype: str
    max_model_len: int
    memory_bytes: int
    tokens: int
    ratio: float = 1.0


def write_model_config(folder: Path, shape: Shape) -> None:
    """Write the config.json of a 16-bit Llama of this shape; there are no weights."""
    heads = 4 * shape.num_kv_heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": 131072,
        "vocab_size": 1024,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def engine_capacity(cache_dtype: str) -> Capacity:
    """Start an engine in this process and read the capacity that vLLM reports."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_model_config(Path(folder), SHAPE_ENGINE)
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_dtype=cache_dtype,
            max_model_len=ENGINE_CONTEXT,
            max_num_batched_tokens=2048,
        )
        cache_config = llm.llm_engine.vllm_config.cache_config
        memory = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) * GIB
        tokens = cache_config.kv_cache_size_tokens
    return Capacity("engine", cache_dtype, ENGINE_CONTEXT, memory, tokens)


def planned_capacity(cache_dtype: str, shape: Shape, max_model_len: int, memory: int) -> Capacity:
    """Ask vLLM's planner, with the specs that the layers of such a model hand it."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

    from kvq_kernels.fp8 import is_fp8
    from kvq_vllm.backend import backend_for
    from kvq_vllm.config import KVQConfig, is_kvq
    from kvq_vllm.fp8 import Fp8Backend
    from kvq_vllm.residual import LAYER_SUFFIX, residual_spec

    with tempfile.TemporaryDirectory() as folder:
        write_model_config(Path(folder), shape)
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            kv_cache_dtype=cache_dtype,
            max_model_len=max_model_len,
        ).create_engine_config()
    vllm_config.cache_config.kv_cache_layout = "BLHNC"
    ours = is_kvq(cache_dtype)
    pages = FullAttentionSpec(
        block_size=vllm_config.cache_config.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=torch.uint8 if ours else torch.bfloat16,
    )
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(shape.num_layers)]
    specs: dict[str, KVCacheSpec] = {}
    if is_fp8(cache_dtype):
        pages = Fp8Backend.customize_spec(pages)
    elif ours:
        fmt = KVQConfig().format(cache_dtype, shape.head_size)
        pages = backend_for(fmt).customize_spec(pages)
        ring = residual_spec(pages, fmt, torch.bfloat16, 0, pages.page_size_bytes)
        specs = {layer + LAYER_SUFFIX: ring for layer in layers}
    specs = dict.fromkeys(layers, pages) | specs
    config = plan(vllm_config, specs, memory)
    tokens, _ = kv_cache_utils.get_kv_cache_capacity(vllm_config, config)
    return Capacity("planned", cache_dtype, max_model_len, memory, tokens)


def plan(vllm_config: Any, specs: dict[str, Any], memory: int) -> Any:
    """Return vLLM's cache configuration for one worker."""
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # vLLM 0.32
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(vllm_config, [specs], [memory])[0]
    groups = planning.get_global_kv_cache_groups(vllm_config, [specs])
    return planning.get_kv_cache_configs(vllm_config, [specs], [memory], groups)[0]


def with_ratios(rows: Iterable[Capacity]) -> list[Capacity]:
    """Fill in each row's ratio to the "auto" row that it compares with."""
    rows = list(rows)
    auto = {(r.how, r.max_model_len): r.tokens for r in rows if r.cache_dtype == "auto"}
    return [
        Capacity(**(asdict(r) | {"ratio": r.tokens / auto[r.how, r.max_model_len]})) for r in rows
    ]


def in_own_process(kind: str, cache_dtype: str) -> list[Capacity]:
    """Measure in a fresh interpreter, because an engine leaves global state behind."""
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(
            [sys.executable, __file__, "--child", kind, cache_dtype, "--json", out.name],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return [Capacity(**row) for row in json.loads(Path(out.name).read_text())]


def measure(kind: str, cache_dtype: str) -> list[Capacity]:
    if kind == "engine":
        return [engine_capacity(cache_dtype)]
    return [
        planned_capacity(cache_dtype, SHAPE_8B, context, PLANNED_MEMORY)
        for context in PLANNED_CONTEXTS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if options.child:
        rows = measure(*options.child)
    else:
        rows = with_ratios(
            row
            for kind in ("engine", "planned")
            for dtype in DTYPES
            for row in in_own_process(kind, dtype)
        )
        print(f"{'how':8} {'cache dtype':12} {'context':>8} {'GiB':>5} {'tokens':>10} {'ratio':>6}")
        for r in rows:
            print(
                f"{r.how:8} {r.cache_dtype:12} {r.max_model_len:8} {r.memory_bytes / GIB:5.1f} "
                f"{r.tokens:10} {r.ratio:6.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
