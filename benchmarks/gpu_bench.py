"""The Triton kernels on a GPU, right first and then fast: ``python benchmarks/gpu_bench.py``.

Needs torch, Triton and a GPU, neither vLLM nor an installation. First every kernel is compared, in
every configuration that is timed and some more, with attention in float64; several processes do
so, which also compiles the kernels on all cores. Then each shape is timed:

* decode: one new token per request, against PyTorch's flash attention on 16-bit keys and values;
* prefill: a prompt, or a chunk behind a context, against the same;
* seal and store: what they add to a prefill and to a decode step.

A shape's output is compared with float64 again, on its own tensors, before it is timed; a wrong
one ends the program with an error. All sides of a shape are CUDA graphs, replayed in turns with the
L2 cache flushed before each; a time is the median, its spread the 20th and 80th percentile.
Bandwidth is what the kernel has to read, over time, also as a fraction of a copy's on the same
device. Shapes that do not fit the memory or the time (``--seconds``) are listed as skipped.

``--interpret`` runs all of it but the timing in Triton's interpreter on a CPU, on tiny shapes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import torch
import triton

from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, LayerCache, reference
from kvq_kernels import triton as kernels
from kvq_kernels.formats import DEFAULT_UNIT_SIZE

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRET else "cuda")
RING_BLOCK = 32
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest error over largest output. bf16: its own rounding of weights and output is 2**-8 each,
as in any flash attention. fp16: 2**-11 each, and of the logits of the largest keys."""
MAX_FP32_ERROR = {"decode": 4e-3, "prefill": 2e-5}
"""As above, for fp32. Decode multiplies codes in fp16 whatever the dtype; prefill computes in fp32,
in another order than the oracle and with the hardware's exponential."""
MAX_RECORD_ERROR = 1e-3
"""Root mean square of the dequantised records' difference from the oracle's, over their largest
number. They are the same but for rotated values, whose code may be off by one now and then: a
fifteenth of its token's range."""
TARGETS = {"kvq-int4": 3.3, "kvq-int8": 1.85}
"""Times that decode should be faster than flash attention at >= 32k tokens and batch >= 8."""


@dataclass(frozen=True)
class Shape:
    """One step: `new` tokens in each of `batch` requests that have `context` tokens already."""

    op: str
    batch: int
    context: int
    new: int = 1
    head_size: int = 128
    gqa: int = 4
    num_kv_heads: int = 8
    formats: tuple[str, ...] = tuple(SCHEMES)

    @property
    def length(self) -> int:
        return self.context + self.new

    @property
    def dense_bytes(self) -> int:
        """Of the keys and values in 16 bit."""
        return 4 * self.batch * self.length * self.num_kv_heads * self.head_size


@dataclass(frozen=True)
class Result:
    """One line of the CSV. Times in microseconds; flash is PyTorch's, in 16 bit."""

    op: str
    format: str
    batch: int
    context: int
    new: int
    head_size: int
    gqa: int
    us: float
    us_20: float
    us_80: float
    flash_us: float
    ratio: float
    gb_per_s: float
    fraction_of_copy: float
    error: float


# --- shapes ----------------------------------------------------------------------------------


def timed_shapes() -> Iterator[Shape]:
    """The most telling first."""
    contexts, batches = (32768, 8192, 2048, 131072), (8, 1, 32, 128)
    for context in contexts:
        for batch in batches:
            yield Shape("decode", batch, context + 64)
    for new, context in ((8192, 0), (2048, 0), (2048, 32768), (32768, 0)):
        yield Shape("prefill", 1, context, new)
        yield Shape("seal", 1, context, new)
    for batch in batches:
        yield Shape("store", batch, 32768 + 64)  # no unit is complete
        yield Shape("store", batch, 2047)  # every request completes one
    for batch, context in ((8, 32768), (32, 2048)):
        for head_size in (64, 128, 256):
            for gqa in (1, 4, 6, 8):
                if (head_size, gqa) != (128, 4):
                    heads = 4 if head_size == 256 else 8
                    yield Shape("decode", batch, context + 64, 1, head_size, gqa, heads)
    for head_size, gqa in ((64, 4), (128, 1), (128, 6), (128, 8), (256, 4), (256, 6)):
        yield Shape("prefill", 1, 0, 8192, head_size, gqa, 4)


def tiny_shapes() -> Iterator[Shape]:
    """For the interpreter: every operation once, all formats between them."""
    yield Shape("decode", 2, 130, 1, 64, 2, 1, ("kvq-int4", "kvq-int8"))
    yield Shape("prefill", 1, 0, 140, 64, 2, 1, ("kvq-int4",))
    yield Shape("prefill", 1, 64, 70, 64, 2, 1, ("kvq-k8v4",))
    yield Shape("seal", 1, 0, 140, 64, 2, 1, ("kvq-int8",))
    yield Shape("store", 2, 127, 1, 64, 2, 1, ("kvq-int4",))


@dataclass(frozen=True)
class Check:
    """A configuration to compare with float64: two requests, some chunks, then single tokens."""

    format: str
    head_size: int
    gqa: int
    dtype: torch.dtype = torch.bfloat16
    unit_size: int = DEFAULT_UNIT_SIZE
    key_group_size: int | None = None
    feature: str = "plain"
    chunks: tuple[tuple[int, int], ...] = ((300, 140), (150, 1), (1, 1), (1, 5))


FEATURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda heads: {},
    "soft cap": lambda heads: {"soft_cap": 20.0},
    "window": lambda heads: {"sliding_window": 100},
    "sinks": lambda heads: {"sinks": torch.linspace(-1, 2, heads, device=DEVICE)},
    "alibi": lambda heads: {"alibi_slopes": torch.logspace(-1, -8, heads, 2.0, device=DEVICE)},
}


def checks() -> Iterator[Check]:
    if INTERPRET:
        chunks = ((70, 30), (62, 1), (1, 1))
        for name, feature in zip(SCHEMES, ("plain", "window", "soft cap"), strict=True):
            yield Check(name, 64, 2, torch.float32, 64, 32, feature, chunks)
        return
    for shape in timed_shapes():
        for name in shape.formats:
            yield Check(name, shape.head_size, shape.gqa)
    for name in SCHEMES:
        for head_size in (64, 80, 96, 128, 192, 256):
            yield Check(name, head_size, 4)
        for gqa in (1, 3, 8, 12, 16):
            yield Check(name, 128, gqa)
        for dtype in (torch.float16, torch.float32):
            yield Check(name, 128, 4, dtype)
        for unit_size, group in ((64, 32), (64, 64), (128, 64), (128, 128), (256, 64), (256, 256)):
            yield Check(name, 128, 4, unit_size=unit_size, key_group_size=group)
        for feature in FEATURES:
            yield Check(name, 128, 4, feature=feature)


# --- float64 ---------------------------------------------------------------------------------


def attention64(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Causal attention of the last queries of one sequence in float64, ``[n, heads, D]``."""
    (n, heads, d), (m, kv_heads, _) = query.shape, key.shape
    q = query.double().view(n, kv_heads, heads // kv_heads, d)
    logits = torch.einsum("qhgd,khd->hgqk", q, key.double()) * params.scale
    if params.soft_cap:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    positions = torch.arange(m, device=query.device)
    distances = positions[m - n :, None] - positions
    if params.alibi_slopes is not None:
        logits -= params.alibi_slopes.double().view(kv_heads, -1, 1, 1) * distances
    hidden = distances < 0
    if params.sliding_window is not None:
        hidden |= distances >= params.sliding_window
    logits = logits.masked_fill(hidden, -math.inf)
    if params.sinks is not None:
        sinks = params.sinks.double().view(kv_heads, -1, 1, 1).expand(-1, -1, n, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., :m]
    return torch.einsum("hgqk,khd->qhgd", weights, value.double()).reshape(query.shape)


def rule64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sealed: tuple[torch.Tensor, torch.Tensor],
    fmt: Format,
    params: AttentionParams,
) -> torch.Tensor:
    """What the last queries of a sequence see by the rule, in float64.

    `sealed` are the dequantised keys and values of all units before the last query's.
    """
    out = torch.empty_like(query, dtype=torch.float64)
    start, end = len(key) - len(query), len(key)
    for unit in range(start // fmt.unit_size * fmt.unit_size, end, fmt.unit_size):
        first, last = max(start, unit), min(end, unit + fmt.unit_size)
        k = torch.cat([sealed[0][:unit].double(), key[unit:last].double()])
        v = torch.cat([sealed[1][:unit].double(), value[unit:last].double()])
        rows = slice(first - start, last - start)
        out[rows] = attention64(query[rows], k, v, params)
    return out


def compare(actual: torch.Tensor, expected: torch.Tensor, op: str, what: object) -> float:
    """Return the largest error over the largest output; end the program if it is too large.

    `op` is the kernel, decode or prefill.
    """
    error = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
    limit = MAX_FP32_ERROR[op] if actual.dtype == torch.float32 else MAX_ERROR[actual.dtype]
    if not error <= limit:
        raise SystemExit(f"WRONG RESULT, error {error:.1e}: {what}")
    return error


def sealed_tokens(
    cache: LayerCache, request: int, units: slice, heads: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dequantised units of some kv heads, keys and values ``[num_tokens, heads, D]``."""
    pages = cache.pages[cache.block_table[request, units].long(), heads]
    key, value = reference.unpack_records(pages.flatten(-2), cache.fmt)
    return key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)


def compare_records(
    cache: LayerCache,
    request: int,
    units: slice,
    heads: slice,
    key: torch.Tensor,
    value: torch.Tensor,
    what: object,
) -> float:
    """Return the error of a request's records; end the program if it is too large.

    `key` and `value` are the whole sequence's, of all kv heads.
    """
    worst, size = 0.0, cache.fmt.unit_size
    actual = sealed_tokens(cache, request, units, heads)
    expected = reference.fake_quantise(key[:, heads], value[:, heads], cache.fmt)
    for x, whole in zip(actual, expected, strict=True):
        y = whole[units.start * size : units.stop * size]
        error = ((x - y).square().mean().sqrt() / y.abs().max()).item() if len(y) else 0.0
        if not error <= MAX_RECORD_ERROR:
            raise SystemExit(f"WRONG RECORDS, error {error:.1e}: {what}")
        worst = max(worst, error)
    return worst


# --- caches ----------------------------------------------------------------------------------


def empty_cache(
    fmt: Format, batch: int, num_kv_heads: int, length: int, dtype: torch.dtype, spare: int = 8
) -> LayerCache:
    """Return an empty cache with scattered pages, for `spare` speculative tokens."""
    blocks = -(-length // fmt.unit_size)
    ring_blocks = -(-(fmt.unit_size + spare) // RING_BLOCK)
    shape = (num_kv_heads, fmt.unit_size, fmt.bytes_per_token)
    table = torch.randperm(batch * blocks, device=DEVICE, dtype=torch.int32).view(batch, blocks)
    ring_table = torch.randperm(batch * ring_blocks, device=DEVICE, dtype=torch.int32)
    ring_shape = (batch * ring_blocks, num_kv_heads, RING_BLOCK, 2 * fmt.head_size)
    return LayerCache(
        fmt,
        torch.full((batch * blocks, *shape), 0xFF, dtype=torch.uint8, device=DEVICE),
        table,
        torch.full(ring_shape, math.nan, dtype=dtype, device=DEVICE),
        ring_table.view(batch, ring_blocks),
        ring_blocks * RING_BLOCK,
    )


def batch_of(new: list[int], lengths: list[int]) -> Batch:
    starts = torch.tensor([0, *new], device=DEVICE).cumsum(0).int()
    return Batch(starts, torch.tensor(lengths, device=DEVICE, dtype=torch.int32))


def random_tokens(count: int, heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, with one outlier channel per head as keys have."""
    x = torch.randn(count, heads, head_size, device=DEVICE)
    x[..., 1] += 8
    return x.to(dtype)


# --- checking --------------------------------------------------------------------------------


def check(config: Check) -> float:
    """Run a batch through all kernels, step by step, against float64; return the error."""
    torch.manual_seed(0)
    fmt = Format.create(config.format, config.head_size, config.unit_size, config.key_group_size)
    kv_heads = 2
    heads, dtype = kv_heads * config.gqa, config.dtype
    params = AttentionParams(config.head_size**-0.5, **FEATURES[config.feature](heads))
    totals = [sum(chunk) for chunk in zip(*config.chunks, strict=True)]
    query = [torch.randn(n, heads, config.head_size, device=DEVICE).to(dtype) for n in totals]
    key = [random_tokens(n, kv_heads, config.head_size, dtype) for n in totals]
    value = [torch.randn_like(x) for x in key]
    cache = empty_cache(fmt, len(totals), kv_heads, max(totals), dtype)
    done, worst = [0] * len(totals), 0.0
    for chunks in config.chunks:
        spans = [slice(a, a + n) for a, n in zip(done, chunks, strict=True)]
        q, k, v = (
            torch.cat([rows[span] for rows, span in zip(x, spans, strict=True)])
            for x in (query, key, value)
        )
        out = torch.full_like(q, math.nan)
        batch = batch_of(list(chunks), [span.stop for span in spans])
        op = "decode" if max(chunks) <= 1 + cache.ring_capacity - fmt.unit_size else "prefill"
        if op == "decode":
            kernels.store(k, v, cache, batch)
            kernels.decode(q, cache, batch, params, out)
        else:
            kernels.seal(k, v, cache, batch)
            kernels.prefill(q, k, v, cache, batch, params, out)
            kernels.write_ring(k, v, cache, batch)
        row = 0
        for i, span in enumerate(spans):
            tokens, units = slice(span.stop), slice(0, span.stop // fmt.unit_size)
            k, v = key[i][tokens], value[i][tokens]
            compare_records(cache, i, units, slice(None), k, v, (config, chunks))
            sealed = sealed_tokens(cache, i, units, slice(None))
            expected = rule64(query[i][span], k, v, sealed, fmt, params)
            part = out[row : row + len(expected)]
            worst = max(worst, compare(part, expected, op, (config, chunks)))
            row += len(expected)
            done[i] = span.stop
    return worst


def check_all(jobs: int) -> None:
    configs = list(dict.fromkeys(checks()))
    start = time.perf_counter()
    if jobs == 1:
        errors = [check(config) for config in configs]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            errors = list(pool.map(check, configs))
    print(
        f"{len(configs)} configurations agree with float64, largest relative error "
        f"{max(errors):.1e} ({time.perf_counter() - start:.0f} s)",
        flush=True,
    )


# --- timing ----------------------------------------------------------------------------------


@dataclass
class Side:
    """What is timed, how many bytes it has to read and write, and how wrong its result is."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    error: float


class Timer:
    """Replays CUDA graphs in turns, each with a cold L2 cache."""

    def __init__(self) -> None:
        self.flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)

    def graph(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph

    def time(self, runs: list[Callable[[], object]], seconds: float) -> list[list[float]]:
        """Return the times of each of `runs` in microseconds."""
        graphs = [self.graph(run) for run in runs]
        times: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + seconds
        while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 200):
            for graph, taken in zip(graphs, times, strict=True):
                begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush.zero_()
                begin.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                taken.append(begin.elapsed_time(stop) * 1e3)
        return times

    def copy_bandwidth(self) -> float:
        """Return bytes per second, read and written."""
        source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        (times,) = self.time([lambda: target.copy_(source)], 0.5)
        return 2 * source.numel() / (statistics.median(times) * 1e-6)


class Step:
    """The tensors of one shape: every request holds the same tokens, in pages of its own."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.dtype = torch.float32 if INTERPRET else torch.bfloat16
        self.num_heads = shape.gqa * shape.num_kv_heads
        size = (shape.num_kv_heads, shape.head_size)
        self.key = random_tokens(shape.length, *size, self.dtype)
        self.value = torch.randn_like(self.key)
        rows = (shape.batch * shape.new, self.num_heads, shape.head_size)
        self.query = torch.randn(rows, device=DEVICE).to(self.dtype)
        self.params = AttentionParams(shape.head_size**-0.5)
        self.batch = batch_of([shape.new] * shape.batch, [shape.length] * shape.batch)
        self.new_key = self.key[shape.context :].repeat(shape.batch, 1, 1)
        self.new_value = self.value[shape.context :].repeat(shape.batch, 1, 1)

    def cache(self, fmt: Format) -> LayerCache:
        """Return a cache that holds the context of all requests."""
        shape = self.shape
        cache = empty_cache(fmt, shape.batch, shape.num_kv_heads, shape.length, self.dtype)
        if shape.context:
            context = batch_of([shape.context], [shape.context])
            first = cache.requests(0, 1)
            key, value = self.key[: shape.context], self.value[: shape.context]
            kernels.seal(key, value, first, context)
            kernels.write_ring(key, value, first, context)
            for table, memory in (
                (cache.block_table, cache.pages),
                (cache.ring_table, cache.ring),
            ):
                for row in table[1:]:
                    memory[row.long()] = memory[table[0].long()]
        return cache

    def check_attention(self, out: torch.Tensor, cache: LayerCache) -> float:
        """Compare some queries of the last request, all heads of its last kv head."""
        shape, fmt = self.shape, cache.fmt
        gqa, new = shape.gqa, min(shape.new, 16)
        units, last = slice(0, shape.length // fmt.unit_size), slice(-1, None)
        compare_records(cache, -1, units, last, self.key, self.value, (shape, fmt))
        sealed = sealed_tokens(cache, -1, units, last)
        query, key, value = self.query[-new:, -gqa:], self.key[:, last], self.value[:, last]
        expected = rule64(query, key, value, sealed, fmt, self.params)
        return compare(out[-new:, -gqa:], expected, shape.op, (shape, fmt))

    def side(self, name: str) -> Side:
        shape = self.shape
        fmt = Format.create(name, shape.head_size, 64 if INTERPRET else None)
        cache, out = self.cache(fmt), torch.full_like(self.query, math.nan)
        new = (self.new_key, self.new_value, cache, self.batch)
        sealed = shape.length // fmt.unit_size * fmt.unit_size
        token_bytes = 2 * shape.head_size * self.dtype.itemsize
        per_head = shape.batch * shape.num_kv_heads
        query_bytes = 2 * self.query.numel() * self.dtype.itemsize
        kernels.seal(*new)
        if shape.op in ("decode", "prefill"):
            fresh = shape.new
            if shape.op == "decode":
                kernels.write_ring(*new)
                fresh = shape.length - sealed

            def run() -> None:
                if shape.op == "decode":
                    kernels.decode(self.query, cache, self.batch, self.params, out)
                else:
                    kernels.prefill(self.query, *new, self.params, out)

            run()
            num_bytes = per_head * (sealed * fmt.bytes_per_token + fresh * token_bytes)
            return Side(name, run, num_bytes + query_bytes, self.check_attention(out, cache))
        first_unit = shape.context // fmt.unit_size
        units = shape.length // fmt.unit_size - first_unit
        num_bytes = per_head * units * fmt.unit_size * (token_bytes + fmt.bytes_per_token)
        if shape.op == "store":
            num_bytes += per_head * shape.new * 2 * token_bytes
        operation = getattr(kernels, shape.op)
        cache.pages[cache.block_table[:, first_unit : first_unit + units].long()] = 0xFF
        operation(*new)
        sealed_now = slice(first_unit, first_unit + units)
        heads = slice(None)
        error = compare_records(cache, -1, sealed_now, heads, self.key, self.value, (shape, fmt))
        return Side(name, lambda: operation(*new), num_bytes, error)

    def flash(self) -> Callable[[], object] | None:
        """Return PyTorch's flash attention on the same tokens, or None where it has none."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        shape = self.shape
        if shape.op in ("seal", "store"):
            return None
        query = self.query.view(shape.batch, shape.new, self.num_heads, -1).transpose(1, 2)
        key, value = (
            x.transpose(0, 1).expand(shape.batch, -1, -1, -1).contiguous()
            for x in (self.key, self.value)
        )
        causal: dict[str, Any] = {}
        if shape.new > 1 and shape.context == 0:
            causal = {"is_causal": True}
        elif shape.new > 1:
            causal = {"attn_mask": causal_lower_right(shape.new, shape.length)}

        def run() -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, enable_gqa=shape.gqa > 1, **causal
                )

        return run


def bench(shape: Shape, timer: Timer, copy: float, seconds: float) -> list[Result]:
    """Check, then time a shape."""
    step = Step(shape)
    sides = [step.side(name) for name in shape.formats]
    runs = [side.run for side in sides]
    flash = step.flash()
    times = timer.time(runs + ([flash] if flash else []), seconds)
    flash_us = statistics.median(times[-1]) if flash else math.nan
    results = []
    for side, taken in zip(sides, times, strict=False):
        us = statistics.median(taken)
        quantiles = statistics.quantiles(taken, n=5, method="inclusive")
        rate = side.num_bytes / (us * 1e-6)
        results.append(
            Result(
                shape.op, side.name, shape.batch, shape.context, shape.new, shape.head_size,
                shape.gqa, us, quantiles[0], quantiles[-1], flash_us, flash_us / us, rate / 1e9,
                rate / copy, side.error,
            )
        )  # fmt: skip
    return results


def why_skipped(shape: Shape) -> str | None:
    # The dense keys and values, and all formats' pages: 1.2 of it together.
    needed, (free, _) = int(2.5 * shape.dense_bytes), torch.cuda.mem_get_info()
    return f"needs {needed / 2**30:.0f} GiB" if needed > 0.9 * free else None


def bench_all(seconds: float) -> list[Result]:
    deadline = time.perf_counter() + seconds
    timer = Timer()
    copy = timer.copy_bandwidth()
    print(f"{device_name()}: copy {copy / 1e9:.0f} GB/s\n{HEADER}", flush=True)
    results: list[Result] = []
    shapes = list(timed_shapes())
    for number, shape in enumerate(shapes):
        left = deadline - time.perf_counter()
        if left <= 0:
            print(f"skipped for want of time: {len(shapes) - number} shapes from {shape} on")
            break
        if reason := why_skipped(shape):
            print(f"skipped, {reason}: {shape}")
            continue
        for result in bench(shape, timer, copy, left / (len(shapes) - number) / 2):
            results.append(result)
            print(line(result), flush=True)
    return results


# --- output ----------------------------------------------------------------------------------


HEADER = (
    "op       format    batch context   new   D gqa        us   (20-80%)      flash us  ratio"
    "   GB/s  of copy   error"
)


def line(r: Result) -> str:
    ratio = f"{r.ratio:5.2f}x"
    if r.op == "decode" and r.context >= 32768 and r.batch >= 8 and r.format in TARGETS:
        ratio += "" if r.ratio >= TARGETS[r.format] else " (below target)"
    return (
        f"{r.op:8} {r.format:9} {r.batch:5} {r.context:7} {r.new:5} {r.head_size:3} {r.gqa:3} "
        f"{r.us:9.1f} ({r.us_20:.1f}-{r.us_80:.1f}) {r.flash_us:9.1f} {ratio} "
        f"{r.gb_per_s:6.0f} {r.fraction_of_copy:7.0%} {r.error:8.1e}"
    )


def device_name() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def write_csv(results: list[Result], path: Path) -> None:
    with path.open("w", newline="") as file:
        fields = [field.name for field in dataclasses.fields(Result)]
        writer = csv.DictWriter(file, ["device", *fields])
        writer.writeheader()
        writer.writerows({"device": device_name(), **dataclasses.asdict(r)} for r in results)


def plot(results: list[Result], path: Path) -> None:
    """Decode's gain over flash attention by context, one line per format and batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(8, 5))
    decodes = [r for r in results if (r.op, r.head_size, r.gqa) == ("decode", 128, 4)]
    for name in SCHEMES:
        for batch in sorted({r.batch for r in decodes}):
            points = sorted(
                (r.context, r.ratio) for r in decodes if (r.format, r.batch) == (name, batch)
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{name}, batch {batch}")
    axes.set(xscale="log", xlabel="context", ylabel="times faster than 16-bit flash attention")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend(fontsize="small")
    plt.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="tiny, on a CPU, no times")
    parser.add_argument("--check-only", action="store_true", help="no times")
    parser.add_argument("--seconds", type=float, default=150, help="for the timing")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--csv", type=Path, help="write all results there")
    parser.add_argument("--plot", type=Path, help="draw decode there; needs matplotlib")
    options = parser.parse_args()
    if not INTERPRET and not torch.cuda.is_available():
        sys.exit("There is no GPU here: --interpret runs the checks on a CPU.")
    check_all(1 if INTERPRET else options.jobs)
    if INTERPRET:
        for shape in tiny_shapes():
            for name in shape.formats:
                error = Step(shape).side(name).error
                print(f"{shape.op} {name}: {error:.1e}", flush=True)
        print("no times: this was the interpreter")
        return
    if options.check_only:
        return
    results = bench_all(options.seconds)
    if options.csv:
        write_csv(results, options.csv)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
