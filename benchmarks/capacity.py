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


def planned_capacities() -> list[Capacity]:
    """Ask vLLM's planner, as ``kvq plan`` does."""
    from kvq_vllm.planning import LayerShape, ModelShape, plan

    layer = LayerShape(SHAPE_8B.num_kv_heads, SHAPE_8B.head_size, SHAPE_8B.head_size)
    model = ModelShape(
        name="8B",
        layers=(layer,) * SHAPE_8B.num_layers,
        num_heads=4 * SHAPE_8B.num_kv_heads,
        max_context=max(PLANNED_CONTEXTS),
        dtype="bfloat16",
        weight_bytes=None,
    )
    result = plan(model, cache_memory=PLANNED_MEMORY, contexts=PLANNED_CONTEXTS, use_vllm=True)
    rows = []
    for cache_dtype in DTYPES:
        planned = result.format(cache_dtype)
        if planned.planned_by != "vllm":
            sys.exit(f"vLLM did not plan {cache_dtype}: {planned.problem}")
        for fit in planned.fits:
            tokens = int(fit.concurrency * fit.context)
            rows.append(Capacity("planned", cache_dtype, fit.context, PLANNED_MEMORY, tokens))
    return rows


def with_ratios(rows: Iterable[Capacity]) -> list[Capacity]:
    """Fill in each row's ratio to the "auto" row that it compares with."""
    rows = list(rows)
    auto = {(r.how, r.max_model_len): r.tokens for r in rows if r.cache_dtype == "auto"}
    return [
        Capacity(**(asdict(r) | {"ratio": r.tokens / auto[r.how, r.max_model_len]})) for r in rows
    ]


def engine_capacity_in_own_process(cache_dtype: str) -> Capacity:
    """Measure in a fresh interpreter, because an engine leaves global state behind."""
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(
            [sys.executable, __file__, "--child", cache_dtype, "--json", out.name],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (row,) = json.loads(Path(out.name).read_text())
        return Capacity(**row)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--child", metavar="DTYPE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if options.child:
        rows = [engine_capacity(options.child)]
    else:
        engines = [engine_capacity_in_own_process(dtype) for dtype in DTYPES]
        rows = with_ratios([*engines, *planned_capacities()])
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
