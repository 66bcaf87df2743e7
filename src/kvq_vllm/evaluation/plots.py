"""The report's plots, as PNG files and as SVG to put into the page.

Needs matplotlib, the extra ``kvq-vllm[plots]``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_vllm.evaluation.results import Evaluation, FormatResult
from kvq_vllm.evaluation.verdict import COPYING, KL

# Colours that people with any colour vision can tell apart (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Plot:
    """One picture.

    Attributes:
        name: of the file, without its ending.
        caption: what it shows.
        svg: the picture as an ``<svg>`` element.
        png: the same as bytes.

    """

    name: str
    caption: str
    svg: str
    png: bytes


def draw(evaluation: Evaluation) -> list[Plot]:
    """Draw all plots for which there are results."""
    formats = evaluation.formats
    plots = []
    if any(f.by_position for f in formats):
        plots.append(_plot("kl-by-position", _KL_CAPTION, formats, _kl_by_position))
    if any(f.by_depth for f in formats):
        plots.append(_plot("citation-by-depth", _DEPTH_CAPTION, formats, _citation_by_depth))
    if any(f.drift for f in formats):
        plots.append(_plot("generation-drift", _DRIFT_CAPTION, formats, _drift))
    return plots


def save(plots: list[Plot], folder: Path) -> None:
    for plot in plots:
        (folder / f"{plot.name}.png").write_bytes(plot.png)


_KL_CAPTION = (
    "Distance of next-token predictions from the unquantised cache, by position in the text. "
    "Dotted: the limits of safe and broken."
)
_DEPTH_CAPTION = (
    "How much less likely the right numbers, names and passages become, by where in the document "
    "they stand (0 is its beginning, furthest from the question)."
)
_DRIFT_CAPTION = (
    "How unlikely the unquantised model finds what was written with each cache, against its own "
    "writing, along the generation."
)


def _plot(
    name: str, caption: str, formats: list[FormatResult], paint: Callable[[Any, Any, Any], None]
) -> Plot:
    import matplotlib

    # No global state: this may run inside somebody's notebook.
    from matplotlib.figure import Figure

    options: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 10}
    with matplotlib.rc_context(options):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        for i, result in enumerate(formats):
            style = {
                "color": _COLOURS[i % len(_COLOURS)],
                "marker": _MARKERS[i % len(_MARKERS)],
                "markersize": 5,
                "capsize": 3,
                "label": result.cache_dtype,
            }
            paint(axes, result, style)
        figure.legend(loc="outside right upper", frameon=False)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=150)
    return Plot(name, caption, _element(svg.getvalue(), name), png.getvalue())


def _element(document: str, name: str) -> str:
    """Cut the SVG element out, and make its ids the page's own."""
    element = document[document.index("<svg") :]
    # matplotlib names groups figure_1, axes_1, ...: twice on a page is once too often.
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", element)


def _errors(estimates: list[Any]) -> list[float]:
    return [e.error or 0.0 for e in estimates]


def _kl_by_position(axes: Any, result: FormatResult, style: dict[str, Any]) -> None:
    values = [bucket.values["kl"] for bucket in result.by_position]
    # Before the first complete unit nothing is quantised: no bar on a logarithmic axis.
    shown = [(b, v) for b, v in zip(result.by_position, values, strict=True) if v.mean > 1e-7]
    x = [(bucket.low + bucket.high) / 2 for bucket, _ in shown]
    estimates = [value for _, value in shown]
    axes.errorbar(x, [v.mean for v in estimates], yerr=_errors(estimates), **style)
    axes.set(xscale="log", yscale="log", xlabel="position", ylabel="KL divergence, nats")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_formatter("")
    for limit in (KL.safe, KL.broken):
        axes.axhline(limit, color="#777777", linestyle=":", linewidth=1)


def _citation_by_depth(axes: Any, result: FormatResult, style: dict[str, Any]) -> None:
    values = [bucket.values["delta_nll"] for bucket in result.by_depth]
    x = [(bucket.low + bucket.high) / 2 for bucket in result.by_depth]
    axes.errorbar(x, [v.mean for v in values], yerr=_errors(values), **style)
    axes.set(xlabel="depth in the document", ylabel="ΔNLL, nats per token", xlim=(0, 1))
    axes.axhline(COPYING.safe, color="#777777", linestyle=":", linewidth=1)


def _drift(axes: Any, result: FormatResult, style: dict[str, Any]) -> None:
    x = [(i + 0.5) / len(result.drift) for i in range(len(result.drift))]
    axes.errorbar(x, [e.mean for e in result.drift], yerr=_errors(result.drift), **style)
    axes.set(xlabel="part of the generation", ylabel="ΔNLL, nats per token", xlim=(0, 1))
    axes.axhline(0, color="#777777", linewidth=1)
