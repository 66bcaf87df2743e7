"""The plan as a picture: requests against context, one line per cache dtype."""

from __future__ import annotations

from pathlib import Path

from kvq_vllm.errors import KVQError
from kvq_vllm.planning import GIB, Plan

_COLOURS = ("#222222", "#1b7837", "#2166ac", "#b2182b", "#762a83", "#e08214", "#35978f")


def contexts(max_context: int) -> list[int]:
    """Return the contexts to plan for a picture: powers of two, and the longest."""
    steps = [1 << n for n in range(10, 21) if 1 << n < max_context]
    return [*steps, max_context]


def _lines(plan: Plan) -> dict[tuple[tuple[int, float], ...], list[str]]:
    """Return each line's points and its cache dtypes, because one line would hide the other."""
    lines: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for fmt in plan.formats:
        if points := tuple((fit.context, fit.concurrency) for fit in fmt.fits if fit.requests):
            lines.setdefault(points, []).append(fmt.cache_dtype)
    return lines


def draw(plan: Plan, path: Path) -> None:
    """Write the picture; its kind follows from the name (``.png``, ``.svg``, ``.pdf``).

    Raises:
        KVQError: matplotlib is missing, or the file cannot be written as that kind.

    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
    except ImportError:
        raise KVQError(
            "Pictures need matplotlib: pip install 'kvq-vllm[plots]', or leave --plot out."
        ) from None
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for number, (points, names) in enumerate(_lines(plan).items()):
        axes.plot(
            *zip(*points, strict=True),
            label=", ".join(names),
            color=_COLOURS[number % len(_COLOURS)],
            linestyle="--" if number == 0 else "-",
            marker="o",
            markersize=3.5,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens per request")
    axes.set_ylabel("requests that fit")
    devices = f", {plan.tensor_parallel_size} devices" if plan.tensor_parallel_size > 1 else ""
    axes.set_title(f"{plan.model.name}: {plan.cache_bytes / GIB:.1f} GiB of cache{devices}")
    axes.grid(which="major", alpha=0.3)
    axes.legend(title="--kv-cache-dtype")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise KVQError(
            f"--plot {path} cannot be written ({str(error).splitlines()[0]}): give a name that "
            "ends in .png, .svg or .pdf, in a folder that exists."
        ) from None
