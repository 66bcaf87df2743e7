#!/usr/bin/env python3
"""The same questions to unmodified vLLM, with and without a quantised KV cache.

    make demo        or        python examples/demo.py [MODEL_FOLDER]

For each cache dtype a fresh process starts an ordinary ``vllm.LLM``, asks three questions, and
reports the cache capacity that vLLM itself computed for the same memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

CACHE_DTYPES = ("auto", "kvq-int8", "kvq-k8v4", "kvq-int4")
QUESTIONS = (
    "Which city is the capital of Japan?",
    "Name the four seasons of the year.",
)
# Something to look up far enough back that it is read from the quantised cache.
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WEATHER = ("mild", "warm", "dry", "cool", "bright", "calm", "fair")
FILLER = " ".join(
    f"On {day} the garden was full of flowers, and the weather stayed {weather} until the evening."
    for day, weather in zip(DAYS * 2, WEATHER * 2, strict=True)
)
QUESTIONS += (
    f"The train to Berlin leaves at platform 7. {FILLER} "
    "From which platform does the train to Berlin leave?",
)
WIDTH = 96


def ask(model: str, cache_dtype: str) -> dict[str, Any]:
    """Start an engine in this process; return its answers and its capacity."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        kv_cache_dtype=cache_dtype,  # the only line that makes the difference
        dtype="bfloat16",
        max_model_len=4096,
        enforce_eager=True,
    )
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for question in QUESTIONS],
        SamplingParams(temperature=0, max_tokens=60),
        use_tqdm=False,
    )
    cache_config = llm.llm_engine.vllm_config.cache_config
    return {
        "answers": [output.outputs[0].text.strip() for output in outputs],
        "tokens": cache_config.kv_cache_size_tokens,
        "requests": cache_config.kv_cache_max_concurrency,
    }


def ask_in_own_process(model: str, cache_dtype: str) -> dict[str, Any]:
    """Run :func:`ask` in a fresh interpreter, quietly unless it fails."""
    print(f"  {cache_dtype} ...", flush=True)
    with tempfile.NamedTemporaryFile() as out:
        child = subprocess.run(
            [sys.executable, __file__, "--child", model, cache_dtype, out.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if child.returncode:
            sys.exit(f"{child.stdout}\nThe engine with --kv-cache-dtype {cache_dtype} failed.")
        result: dict[str, Any] = json.loads(Path(out.name).read_text())
    return result


def show(results: dict[str, dict[str, Any]]) -> None:
    for number, question in enumerate(QUESTIONS):
        print("\n" + question.replace(FILLER, "(14 sentences about a garden)"))
        for cache_dtype, result in results.items():
            answer = " ".join(result["answers"][number].split())
            print(
                textwrap.fill(
                    answer,
                    WIDTH,
                    initial_indent=f"  {cache_dtype:9} ",
                    subsequent_indent=" " * 12,
                )
            )
    print("\nCache capacity that vLLM reports for the same memory:")
    print(f"  {'cache dtype':12} {'tokens':>9} {'requests of 4096':>17} {'gain':>6}")
    for cache_dtype, result in results.items():
        gain = result["tokens"] / results["auto"]["tokens"]
        print(f"  {cache_dtype:12} {result['tokens']:9,} {result['requests']:17.1f} {gain:5.2f}x")
    print("  (Larger heads and longer contexts gain more: up to 3.7x, see docs/performance.md.)")


def default_model() -> str:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tools.setup_env import MODEL

    return str(MODEL)


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if sys.argv[1:2] == ["--child"]:
        model, cache_dtype, out = sys.argv[2:5]
        Path(out).write_text(json.dumps(ask(model, cache_dtype)))
        return
    model = sys.argv[1] if len(sys.argv) > 1 else default_model()
    print(f"Asking {Path(model).name} through vLLM with --kv-cache-dtype")
    show({cache_dtype: ask_in_own_process(model, cache_dtype) for cache_dtype in CACHE_DTYPES})


if __name__ == "__main__":
    main()
