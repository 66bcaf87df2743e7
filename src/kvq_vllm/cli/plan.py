"""``kvq plan``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvq_kernels.formats import DEFAULT_UNIT_SIZE
from kvq_vllm.cli.output import print_json
from kvq_vllm.errors import KVQError

if TYPE_CHECKING:
    from kvq_vllm.planning import FormatPlan, ModelShape, Plan

HELP = """
Say how many requests fit in memory, for every cache dtype.

MODEL is a Hugging Face folder, a config.json, or a model in the local hub cache. Where vLLM is
installed its own planner decides; elsewhere the formula does.

[bold]Examples[/bold]

  kvq plan ~/models/Llama-3.1-8B --memory 24GiB

  kvq plan config.json --tensor-parallel-size 4 --context 32k --context 128k

  kvq plan MODEL --kv-cache-memory 20GiB --plot capacity.png

  kvq plan --layers 32 --heads 32 --kv-heads 8 --head-size 128 --weights 16GB

  kvq plan MODEL --json
"""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size(text: str) -> int:
    """Read a size: ``20GiB``, ``24g`` (both binary), ``80GB`` (decimal), ``32k``, or a number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    unit = match[2] if match else "?"
    scale = _DECIMAL.get(unit) or _UNITS.get(unit.removesuffix("ib"))
    if match is None or scale is None:
        raise KVQError(f"{text!r} is no size: write it like 20GiB, 80GB or 32k.")
    return int(float(match[1]) * scale)


_SIZE = {"parser": parse_size, "metavar": "SIZE"}
_BY_HAND = "Instead of MODEL"


def command(
    model: Annotated[str | None, typer.Argument(help="Model to plan for.")] = None,
    memory: Annotated[
        int, typer.Option(help="Memory of one device, for weights and cache.", **_SIZE)
    ] = "80GiB",  # type: ignore[assignment]
    kv_cache_memory: Annotated[
        int | None, typer.Option(help="Cache of one device, in place of --memory.", **_SIZE)
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Tokens per request, such as 32k; may be given again.", metavar="SIZE"),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", help="Devices.")
    ] = 1,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the memory that vLLM takes.")
    ] = 0.92,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="As vLLM's option; matters to sliding windows.")
    ] = None,
    unit_size: Annotated[
        int, typer.Option(help="Tokens sealed together, as in additional_config.")
    ] = DEFAULT_UNIT_SIZE,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32, in place of the model's.")
    ] = None,
    weights: Annotated[
        int | None, typer.Option(help="Size of the weights on all devices.", **_SIZE)
    ] = None,
    layers: Annotated[int | None, typer.Option(rich_help_panel=_BY_HAND)] = None,
    heads: Annotated[
        int | None, typer.Option(help="Query heads.", rich_help_panel=_BY_HAND)
    ] = None,
    kv_heads: Annotated[int | None, typer.Option(rich_help_panel=_BY_HAND)] = None,
    head_size: Annotated[int, typer.Option(rich_help_panel=_BY_HAND)] = 128,
    formula: Annotated[
        bool, typer.Option("--formula", help="Do not ask vLLM, even where it is installed.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw requests against context: a .png, .svg or .pdf.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from dataclasses import replace

    from rich.console import Console

    from kvq_vllm.config import KVQConfig
    from kvq_vllm.planning import default_contexts, picture, plan, read_model
    from kvq_vllm.planning.shape import DTYPE_BYTES

    if (model is None) == (layers is None):
        raise KVQError("Give either MODEL, or --layers and --kv-heads to describe one.")
    shape = read_model(model) if model else _by_hand(layers, heads, kv_heads, head_size)
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise KVQError(f"--dtype {dtype} is unknown: give bfloat16, float16 or float32.")
    if weights is not None:
        shape = replace(shape, weight_bytes=weights, weights_from="option")
    shape = replace(shape, dtype=dtype or shape.dtype)
    shown = tuple(parse_size(c) for c in context or ()) or default_contexts(shape.max_context)
    planned = {*shown, *(picture.contexts(shape.max_context) if plot else ())}
    with Console(stderr=True).status("Planning ..."):
        result = plan(
            shape,
            memory=memory,
            cache_memory=kv_cache_memory,
            contexts=sorted(planned),
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_batched_tokens=max_num_batched_tokens,
            options=KVQConfig.parse({"kvq": {"unit_size": unit_size}}),
            use_vllm=False if formula else None,
        )
    if plot:
        picture.draw(result, plot)
    if json:
        print_json(result)
    else:
        _show(result, sorted(set(shown)))


def _by_hand(
    layers: int | None, heads: int | None, kv_heads: int | None, head_size: int
) -> ModelShape:
    from kvq_vllm.planning import LayerShape, ModelShape
    from kvq_vllm.planning.shape import check_size

    if not layers or not kv_heads or layers < 1 or kv_heads < 1 or head_size < 1:
        raise KVQError("A model by hand needs --layers and --kv-heads, both 1 or more.")
    for option, field, value in (
        ("--layers", "num_layers", layers),
        ("--heads", "num_heads", heads),
        ("--kv-heads", "num_kv_heads", kv_heads),
        ("--head-size", "head_dim", head_size),
    ):
        check_size(option, field, value)
    if heads and heads % kv_heads:
        raise KVQError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}: correct one.")
    return ModelShape(
        name=f"{layers} layers, {kv_heads} kv heads, head size {head_size}",
        layers=(LayerShape(kv_heads, head_size, head_size),) * layers,
        # Any number of query heads that can be shared does; only their kv heads take memory.
        num_heads=heads or kv_heads * 64,
        max_context=1 << 20,
        dtype="bfloat16",
        weight_bytes=None,
    )


# --- printing --------------------------------------------------------------------------------


def _show(plan: Plan, contexts: list[int]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(_title(plan))
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("cache dtype")
    table.add_column("KiB/token", justify="right")
    table.add_column("ring MiB", justify="right")
    for context in contexts:
        table.add_column(f"requests\nof {_tokens(context)}", justify="right")
    for fmt in plan.formats:
        table.add_row(*_row(fmt, contexts))
    console.print(table)
    for note in _notes(plan):
        console.print(f"[dim]{escape(note)}[/dim]")
    for line in plan.advice:
        console.print(line)


def _title(plan: Plan) -> str:
    from kvq_vllm.planning import show_size

    shape = plan.model
    devices = f" x {plan.tensor_parallel_size} devices" if plan.tensor_parallel_size > 1 else ""
    parts = [f"[bold]{shape.name}[/bold]", f"{len(shape.layers)} layers with a cache"]
    if shape.state_layers:
        parts.append(f"{len(shape.state_layers)} with a state")
    if plan.weight_bytes is not None:
        about = "about " if shape.weights_from == "estimate" else ""
        parts.append(f"{about}{show_size(plan.weight_bytes)} of weights ({shape.weight_bits}-bit)")
    parts.append(f"{show_size(plan.cache_bytes)} of cache")
    by = f"vLLM {plan.vllm_version}" if plan.vllm_version else "the formula"
    per_device = " per device" if devices else ""
    return f"{', '.join(parts)}{per_device}{devices}; planned by {by}"


def _row(fmt: FormatPlan, contexts: list[int]) -> list[str]:
    if fmt.planned_by is None:
        return [fmt.cache_dtype, "-", "-", *("-" for _ in contexts)]
    cells = []
    for context in contexts:
        fit = fmt.at(context)
        gain = f"{fit.gain:.2f}x" if fit.requests else ""
        cells.append(f"{fit.requests:,} [dim]{gain:>6}[/dim]")
    ring = f"{fmt.ring_bytes / (1 << 20):.1f}" if fmt.ring_bytes else "-"
    return [fmt.cache_dtype, f"{fmt.bytes_per_token / 1024:.1f}", ring, *cells]


def _notes(plan: Plan) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for fmt in plan.formats:
        if fmt.problem:
            by_formula = "by the formula; vLLM: " if fmt.planned_by else "not supported: "
            reasons.setdefault(by_formula + fmt.problem, []).append(fmt.cache_dtype)
    notes = [f"{', '.join(names)}: {reason}." for reason, names in reasons.items()]
    notes += [note + "." for note in plan.model.notes]
    if plan.vllm_version is None and not plan.model.needs_formula and not reasons:
        notes.append("By the formula: where vLLM is installed, its own planner decides.")
    if plan.memory_bytes is not None:
        notes.append(
            "Activations and CUDA graphs also take memory, often 1 to 4 GiB: for exact figures, "
            "give the cache that vLLM reports at start-up with --kv-cache-memory."
        )
    return notes


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"
