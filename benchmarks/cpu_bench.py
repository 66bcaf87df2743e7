"""C++ kernels against vLLM's own 16-bit CPU attention: ``python benchmarks/cpu_bench.py --quick``.

Each case runs vLLM's operation (bf16 cache) and ours for every format in turns, in one process,
and reports the median over rounds of the ratio of neighbouring times, with the 10th and 90th
percentile as its spread; above 1 we are faster. `ratio_of_best` compares the fastest rounds of
both sides, for machines where others disturb most rounds. `decode` is one new token per request
over `context` cached tokens plus half an open unit; `prefill` is a prompt of `context` tokens.
The output is first compared with the oracle's. Both sides go round as many copies of the cache,
"layers", as outgrow the last-level cache: in a model a layer's cache is cold when its turn comes.

vLLM loads one build of its operations per process, the best for the CPU; ``--vllm-isa avx2``
makes it the one for CPUs without AVX-512. ``--isa`` does the same for ours.

A machine with other work on it needs more rounds (``--seconds``), or for one thread
``--cpu-time``. With two threads one waits for the other, so nothing but a quiet machine will do.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, LayerCache, cpu, reference

# Tokens beyond the context when decoding: half a window of 128 tokens, three quarters of 256.
TAIL = 192
VLLM_BLOCK_SIZE = 128
LAYERS_BYTES = 128 * 2**20  # of vLLM's cache, all layers together
MAX_ERROR = 6e-3  # bf16 output, see tests/kernels/test_cpu.py


@dataclass(frozen=True)
class Case:
    op: str
    batch: int
    context: int
    head_size: int = 128
    gqa: int = 4
    threads: int = 1
    num_kv_heads: int = 8


@dataclass(frozen=True)
class Result:
    op: str
    format: str
    batch: int
    context: int
    head_size: int
    gqa: int
    threads: int
    isa: str
    vllm_isa: str
    ms: float
    vllm_ms: float
    ratio_vs_vllm: float
    spread: tuple[float, float]
    ratio_of_best: float
    error: float
    ratio_vs_oracle: float | None = None


def all_cases() -> Iterator[Case]:
    for threads in (1, 2):
        for batch in (1, 8):
            for context in (512, 2048, 8192):
                yield Case("decode", batch, context, threads=threads)
        yield Case("decode", 1, 32768, threads=threads)
        for head_size, gqa in ((64, 4), (256, 4), (128, 1), (128, 3), (128, 8)):
            for batch in (1, 8):
                yield Case("decode", batch, 8192, head_size, gqa, threads)
        for context in (2048, 8192):
            yield Case("prefill", 1, context, threads=threads)
    for head_size, gqa in ((64, 3), (128, 1)):
        yield Case("prefill", 1, 2048, head_size, gqa)


def quick_cases() -> Iterator[Case]:
    yield Case("decode", 1, 512)
    yield Case("decode", 1, 8192)
    yield Case("decode", 1, 8192, head_size=64, gqa=3)
    yield Case("prefill", 1, 2048)


class Step:
    """The tensors of one step, shared by all sides."""

    def __init__(self, case: Case, num_layers: int | None = None) -> None:
        torch.manual_seed(0)
        self.case = case
        prefill = case.op == "prefill"
        self.length = case.context + (0 if prefill else TAIL)
        self.new = self.length if prefill else 1
        count, d = case.batch * self.length, case.head_size
        self.num_heads = case.gqa * case.num_kv_heads
        # All tokens of all requests, one request after the other.
        self.key = torch.randn(count, case.num_kv_heads, d).bfloat16()
        self.value = torch.randn(count, case.num_kv_heads, d).bfloat16()
        self.query = torch.randn(case.batch * self.new, self.num_heads, d).bfloat16()
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32) * self.new
        self.lens = torch.full((case.batch,), self.length, dtype=torch.int32)
        self.scale = d**-0.5
        layer_bytes = 4 * count * case.num_kv_heads * d
        if num_layers is None:
            num_layers = 1 if prefill else min(32, -(-LAYERS_BYTES // layer_bytes))
        self.num_layers = num_layers

    def block_table(self, block_size: int) -> torch.Tensor:
        blocks = -(-self.length // block_size)
        table = torch.randperm(self.case.batch * blocks, dtype=torch.int32)
        return table.view(self.case.batch, blocks)


def kvq_side(step: Step, name: str) -> tuple[Callable[[], torch.Tensor], Callable[[], float]]:
    """Return what to time, and what to check it with: the largest relative error."""
    case, fmt = step.case, Format.create(name, step.case.head_size)
    unit_size = fmt.unit_size
    table = step.block_table(unit_size)
    pages = torch.zeros(
        table.numel(), case.num_kv_heads, unit_size, fmt.bytes_per_token, dtype=torch.uint8
    )
    ring_block, capacity = unit_size // 4, unit_size * 5 // 4
    ring_blocks = capacity // ring_block
    ring = torch.zeros(
        case.batch * ring_blocks, case.num_kv_heads, ring_block, 2 * case.head_size,
        dtype=torch.bfloat16,
    )  # fmt: skip
    ring_table = torch.arange(case.batch * ring_blocks, dtype=torch.int32).view(case.batch, -1)
    cache = LayerCache(fmt, pages, table, ring, ring_table, capacity)
    everything = Batch(torch.arange(case.batch + 1, dtype=torch.int32) * step.length, step.lens)
    cpu.seal(step.key, step.value, cache, everything)
    cpu.write_ring(step.key, step.value, cache, everything)
    batch, params = Batch(step.starts, step.lens), AttentionParams(step.scale)
    out = torch.empty_like(step.query)
    layers = [cache]
    for _ in range(1, step.num_layers):
        layers.append(replace(cache, pages=pages.clone(), ring=ring.clone()))
    next_layer = itertools.cycle(layers)

    def run() -> torch.Tensor:
        layer = next(next_layer)
        if case.op == "prefill":
            cpu.prefill(step.query, step.key, step.value, layer, batch, params, out)
        else:
            cpu.decode(step.query, layer, batch, params, out)
        return out

    def error() -> float:
        actual = run()
        if case.op == "decode":
            expected = torch.empty(step.query.shape)
            reference.decode(step.query, cache, batch, params, expected)
        else:  # the last unit of queries will do
            last = slice(-unit_size, None)
            actual, expected = actual[last], torch.empty(unit_size, *step.query.shape[1:])
            tail = Batch(torch.tensor([0, unit_size]), step.lens)
            reference.prefill(
                step.query[last], step.key[last], step.value[last], cache, tail, params, expected
            )
        return ((actual - expected).abs().max() / expected.abs().max()).item()

    def oracle() -> None:
        reference.decode(step.query, cache, batch, params, out)

    run.oracle = oracle  # type: ignore[attr-defined]
    return run, error


def vllm_side(step: Step, ops: ModuleType) -> Callable[[], torch.Tensor]:
    """vLLM's operation, called as by vllm/v1/attention/backends/cpu_attn.py."""
    case, d = step.case, step.case.head_size
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    table = step.block_table(VLLM_BLOCK_SIZE)
    kv = torch.zeros(table.numel(), case.num_kv_heads, 2 * VLLM_BLOCK_SIZE, d, dtype=torch.bfloat16)
    key_cache, value_cache = kv.chunk(2, dim=2)
    positions = torch.arange(step.length)
    slots = [
        row[positions // VLLM_BLOCK_SIZE].long() * VLLM_BLOCK_SIZE + positions % VLLM_BLOCK_SIZE
        for row in table
    ]
    ops.cpu_attn_reshape_and_cache(
        step.key, step.value, key_cache, value_cache, torch.cat(slots), isa
    )
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=case.batch, num_heads=step.num_heads, num_kv_heads=case.num_kv_heads,
        head_dim=d, seq_lens=step.lens, dtype=torch.bfloat16, query_start_loc=step.starts,
        causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    out = torch.empty_like(step.query)
    layers = [kv, *(kv.clone() for _ in range(1, step.num_layers))]
    next_layer = itertools.cycle([layer.chunk(2, dim=2) for layer in layers])

    def run() -> torch.Tensor:
        key_cache, value_cache = next(next_layer)
        ops.cpu_attention_with_kv_cache(
            query=step.query, key_cache=key_cache, value_cache=value_cache, output=out,
            query_start_loc=step.starts, seq_lens=step.lens, scale=step.scale, causal=True,
            alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0.0,
            scheduler_metadata=metadata, s_aux=None,
        )  # fmt: skip
        return out

    return run


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def bench(case: Case, ops: ModuleType, vllm_isa: str, options: argparse.Namespace) -> list[Result]:
    """Time one case for all formats; exits where an output is wrong."""
    torch.set_num_threads(case.threads)
    formats, seconds = options.formats, options.seconds or (1.0 if options.quick else 4.0)
    with_oracle = options.quick or case.batch * case.context <= 8192
    step = Step(case, options.layers)
    vllm = vllm_side(step, ops)
    sides = {name: kvq_side(step, name) for name in formats}
    errors = {name: error() for name, (_, error) in sides.items()}
    for name, error in errors.items():
        if not error <= MAX_ERROR:
            sys.exit(f"{case}: {name} is wrong, error {error:.1e}")
    vllm()
    clock = time.process_time if options.cpu_time else time.perf_counter

    times: dict[str, list[float]] = {name: [] for name in formats}
    vllm_times: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in formats}
    end = time.perf_counter() + seconds
    while len(vllm_times) < 5 or time.perf_counter() < end:
        for name, (run, _) in sides.items():
            # Each with vLLM right before it, so that a disturbance hits both or is an outlier.
            vllm_times.append(timed(vllm, clock))
            times[name].append(timed(run, clock))
            ratios[name].append(vllm_times[-1] / times[name][-1])
    results = []
    for name, (run, _) in sides.items():
        deciles = statistics.quantiles(ratios[name], n=10, method="inclusive")
        ms = statistics.median(times[name]) * 1e3
        oracle = None
        if with_oracle and case.op == "decode":
            oracle = timed(run.oracle) * 1e3 / ms  # type: ignore[attr-defined]
        results.append(
            Result(
                case.op, name, case.batch, case.context, case.head_size, case.gqa, case.threads,
                cpu.isa(), vllm_isa, ms, statistics.median(vllm_times) * 1e3,
                statistics.median(ratios[name]), (deciles[0], deciles[-1]),
                min(vllm_times) / min(times[name]), errors[name], oracle,
            )
        )  # fmt: skip
    return results


def import_vllm(isa: str) -> tuple[ModuleType, str]:
    """Import vLLM's operations, in the build for `isa`; return them and what was loaded."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if isa == "avx2":
        torch.cpu._is_avx512_supported = torch.cpu._is_amx_tile_supported = lambda: False
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        return _custom_ops, "amx"
    best = "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"
    return _custom_ops, best if torch.cpu._is_avx512_supported() else "avx2"


def print_row(r: Result) -> None:
    shape = f"B{r.batch} ctx {r.context:5} D{r.head_size} GQA {r.gqa} threads {r.threads}"
    oracle = f"  oracle {r.ratio_vs_oracle:5.0f}x" if r.ratio_vs_oracle else ""
    print(
        f"{r.op:8}{r.format:9} {shape:40} {r.ms:9.3f} ms  vLLM {r.vllm_ms:9.3f} ms  "
        f"{r.ratio_vs_vllm:5.2f}x [{r.spread[0]:.2f}, {r.spread[1]:.2f}]  "
        f"best {r.ratio_of_best:5.2f}x  "
        f"error {r.error:.1e}{oracle}",
        flush=True,
    )


def plot(results: list[Result], path: Path) -> None:
    from matplotlib import pyplot

    results = [r for r in results if r.op == "decode" and r.head_size == 128 and r.gqa == 4]
    figure, axes = pyplot.subplots()
    for name in SCHEMES:
        for batch, threads in sorted({(r.batch, r.threads) for r in results}):
            line = [r for r in results if (r.format, r.batch, r.threads) == (name, batch, threads)]
            axes.plot(
                [r.context for r in line], [r.ratio_vs_vllm for r in line], marker="o",
                label=f"{name} B{batch}, {threads} threads",
            )  # fmt: skip
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        xscale="log",
        xlabel="context",
        ylabel="times as fast as vLLM's bf16 attention",
        ylim=(0, None),
    )
    axes.legend(fontsize="x-small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four cases, one second each")
    parser.add_argument("--formats", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--op", choices=["decode", "prefill"])
    parser.add_argument("--threads", type=int, nargs="+", help="only these thread counts")
    parser.add_argument("--seconds", type=float, help="time per case; at least five rounds run")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the process: one thread on a busy machine"
    )
    parser.add_argument("--layers", type=int, help="copies of the cache; 1 is a warm cache")
    parser.add_argument(
        "--isa", default="auto", choices=["auto", "portable", "avx2", "avx512", "amx"]
    )
    parser.add_argument("--vllm-isa", default="auto", choices=["auto", "avx2"])
    parser.add_argument("--json", type=Path, help="write a list of results")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path, help="write a picture; needs matplotlib")
    options = parser.parse_args()
    ops, vllm_isa = import_vllm(options.vllm_isa)
    if options.isa != "auto":
        cpu.select_isa(options.isa)
    print(f"ours: {cpu.isa()}, vLLM: {vllm_isa}")
    results: list[Result] = []
    for case in quick_cases() if options.quick else all_cases():
        if options.op not in (None, case.op) or case.threads not in (
            options.threads or [case.threads]
        ):
            continue
        for result in bench(case, ops, vllm_isa, options):
            print_row(result)
            results.append(result)
    rows = [asdict(result) for result in results]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
