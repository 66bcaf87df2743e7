#!/usr/bin/env python3
"""Decoding speed of a real model through vLLM, quantised caches against ``auto``.

    python benchmarks/e2e_bench.py [--json out.json] [--quick]
    python benchmarks/e2e_bench.py --startup [--json out.json]

One process per cache dtype holds an engine on SmolLM2-135M; all are alive at the same time, and
take turns, round by round, while the others wait: what else happens on the machine hits all alike.
A round decodes with full batches, all prompts in the prefix cache. The ratio of a cache dtype is
taken round by round against the ``auto`` of the same round; the spread is the range from the
10th to the 90th percentile of these ratios.

With ``--startup`` it starts engines one after the other instead, in turns, and compares how long
each takes to be ready and how much memory its process has used by then.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.setup_env import CORPUS, MODEL

CACHE_DTYPES = ("auto", "kvq-int8", "kvq-k8v4", "kvq-int4")
CONTEXTS = (1024, 6144)
BATCHES = (1, 8)
MODEL_DTYPES = ("float32", "bfloat16")
DECODED_TOKENS = 24
ROUNDS = 9
STARTUP_ROUNDS = 5


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        model_dtype: of weights and activations.
        cache_dtype: value of ``--kv-cache-dtype``.
        context: tokens before the first decoded one.
        batch: concurrent requests.
        tokens_per_second: median over the rounds, all requests together.
        ratio: median ratio to ``auto`` of the same round.
        spread: 10th and 90th percentile of that ratio.
        peak_gib: peak resident memory of the process after the rounds.

    """

    model_dtype: str
    cache_dtype: str
    context: int
    batch: int
    tokens_per_second: float
    ratio: float
    spread: tuple[float, float]
    peak_gib: float


@dataclass(frozen=True)
class Startup:
    """One row of ``--startup``: medians over the rounds.

    Attributes:
        cache_dtype: value of ``--kv-cache-dtype``.
        seconds: from ``LLM(...)`` to ready.
        seconds_over_auto: median of the differences to ``auto`` of the same round.
        spread: smallest and largest of these differences.
        peak_gib: peak resident memory of the process.

    """

    cache_dtype: str
    seconds: float
    seconds_over_auto: float
    spread: tuple[float, float]
    peak_gib: float


# --- in the process of one engine --------------------------------------------------------------


def serve(model_dtype: str, cache_dtype: str, max_context: int) -> None:
    """Start an engine, then answer one JSON request per line of standard input."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints does not disturb the replies
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(
        model=str(MODEL),
        dtype=model_dtype,
        kv_cache_dtype=cache_dtype,
        enforce_eager=True,
        max_model_len=max_context + 2 * DECODED_TOKENS,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
    )

    def reply(seconds: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        replies.write(json.dumps({"seconds": seconds, "peak_gib": peak}) + "\n")
        replies.flush()

    reply(time.perf_counter() - start)
    for line in sys.stdin:
        reply(decode_seconds(llm, json.loads(line)["prompts"]))


def decode_seconds(llm: Any, prompts: list[list[int]]) -> float:
    """Time of DECODED_TOKENS steps in which every request decodes one token."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(
        temperature=0, max_tokens=DECODED_TOKENS + 2, ignore_eos=True, detokenize=False
    )
    for number, prompt in enumerate(prompts):
        name = f"{time.monotonic_ns()}-{number}"
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    begun: set[str] = set()
    while len(begun) < len(prompts):  # until every prompt is read
        begun |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    start = time.perf_counter()
    for _ in range(DECODED_TOKENS):
        engine.step()
    elapsed = time.perf_counter() - start
    while engine.has_unfinished_requests():
        engine.step()
    return elapsed


# --- in the process that compares --------------------------------------------------------------


class Engine:
    """The process of one engine."""

    def __init__(self, model_dtype: str, cache_dtype: str, max_context: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", model_dtype, cache_dtype, str(max_context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.startup = self._reply()

    def _reply(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with code {self.process.wait()}")
        reply: dict[str, float] = json.loads(line)
        return reply

    def decode(self, prompts: list[list[int]]) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts}) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def make_prompts(batch: int, context: int) -> list[list[int]]:
    """Different stretches of the corpus, so that requests share no pages."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokens = tokenizer.encode(CORPUS.read_text(encoding="utf-8"), add_special_tokens=False).ids
    assert len(tokens) >= batch * context
    return [tokens[i * context : (i + 1) * context] for i in range(batch)]


def compare(
    engines: dict[str, Engine], model_dtype: str, context: int, batch: int, rounds: int
) -> list[Result]:
    """Let the engines take turns on one shape."""
    prompts = make_prompts(batch, context)
    for engine in engines.values():  # reads the prompts, once
        engine.decode(prompts)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    peaks = dict.fromkeys(engines, 0.0)
    for round_number in range(rounds):
        order = list(engines) if round_number % 2 else list(engines)[::-1]
        for name in order:
            reply = engines[name].decode(prompts)
            seconds[name].append(reply["seconds"])
            peaks[name] = reply["peak_gib"]
    results = []
    for name in engines:
        ratios = sorted(a / b for a, b in zip(seconds["auto"], seconds[name], strict=True))
        results.append(
            Result(
                model_dtype=model_dtype,
                cache_dtype=name,
                context=context,
                batch=batch,
                tokens_per_second=batch * DECODED_TOKENS / statistics.median(seconds[name]),
                ratio=statistics.median(ratios),
                spread=(ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]),
                peak_gib=peaks[name],
            )
        )
    return results


def show(results: Sequence[Result]) -> None:
    for r in results:
        low, high = r.spread
        print(
            f"{r.model_dtype:9} {r.cache_dtype:9} context {r.context:5} batch {r.batch}: "
            f"{r.tokens_per_second:7.1f} tokens/s, {r.ratio:5.2f}x ({low:.2f}-{high:.2f}), "
            f"peak {r.peak_gib:.2f} GiB",
            flush=True,
        )


def compare_startup(model_dtype: str) -> list[Startup]:
    """Start engines in turns; a first round, which fills the disk cache, does not count."""
    rounds: list[dict[str, dict[str, float]]] = []
    for round_number in range(STARTUP_ROUNDS + 1):
        order = CACHE_DTYPES if round_number % 2 else CACHE_DTYPES[::-1]
        replies = {}
        for name in order:
            engine = Engine(model_dtype, name, max(CONTEXTS))
            replies[name] = engine.startup
            engine.close()
        rounds.append(replies)
    results = []
    for name in CACHE_DTYPES:
        over = sorted(r[name]["seconds"] - r["auto"]["seconds"] for r in rounds[1:])
        results.append(
            Startup(
                cache_dtype=name,
                seconds=statistics.median(r[name]["seconds"] for r in rounds[1:]),
                seconds_over_auto=statistics.median(over),
                spread=(over[0], over[-1]),
                peak_gib=statistics.median(r[name]["peak_gib"] for r in rounds[1:]),
            )
        )
    return results


def show_startup(results: Sequence[Startup]) -> None:
    for r in results:
        low, high = r.spread
        print(
            f"{r.cache_dtype:9} ready in {r.seconds:5.2f} s, {r.seconds_over_auto:+5.2f} s over "
            f"auto ({low:+.2f} to {high:+.2f}), peak {r.peak_gib:.2f} GiB"
        )


def save(results: Sequence[Result] | Sequence[Startup], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="float32, 1k context, 3 rounds")
    parser.add_argument("--startup", action="store_true", help="start-up time and memory")
    parser.add_argument("--model-dtype", choices=MODEL_DTYPES, help="only this one")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if options.serve:
        model_dtype, cache_dtype, max_context = options.serve
        serve(model_dtype, cache_dtype, int(max_context))
        return
    if options.startup:
        startups = compare_startup(options.model_dtype or "float32")
        show_startup(startups)
        save(startups, options.json)
        return
    model_dtypes = MODEL_DTYPES[:1] if options.quick else MODEL_DTYPES
    if options.model_dtype:
        model_dtypes = (options.model_dtype,)
    contexts = CONTEXTS[:1] if options.quick else CONTEXTS
    results: list[Result] = []
    for model_dtype in model_dtypes:
        engines = {name: Engine(model_dtype, name, max(contexts)) for name in CACHE_DTYPES}
        for context in contexts:
            for batch in BATCHES:
                rows = compare(engines, model_dtype, context, batch, 3 if options.quick else ROUNDS)
                show(rows)
                results += rows
        for engine in engines.values():
            engine.close()
    save(results, options.json)


if __name__ == "__main__":
    main()
