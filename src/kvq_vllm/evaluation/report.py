"""The report: one HTML file that needs nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvq_vllm.errors import KVQError
from kvq_vllm.evaluation import plots
from kvq_vllm.evaluation.results import Evaluation
from kvq_vllm.evaluation.statistics import Estimate
from kvq_vllm.evaluation.verdict import CRITERIA


def check_requirements() -> None:
    """Make sure that a report can be written, before the hours that lead to it.

    Raises:
        KVQError: something is not installed.

    """
    for module in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise KVQError(
                f"The report needs {module}: pip install 'kvq-vllm[plots]', or use --no-report."
            )


def write_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write ``report.html`` and the plots into a folder; return the page's path."""
    import jinja2
    from markupsafe import Markup

    drawn = plots.draw(evaluation)
    plots.save(drawn, folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["estimate"] = show
    page = environment.get_template("report.html").render(
        evaluation=evaluation,
        criteria=CRITERIA,
        # matplotlib escaped the names in it.
        plots=[(plot, Markup(plot.svg)) for plot in drawn],
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def show(value: Estimate, digits: int = 2) -> str:
    """Return mean and standard error, to the same number of decimals."""
    if value.error is None:
        return f"{value.mean:.{digits}g}"
    decimals = _decimals(value.error or value.mean, digits)
    return f"{value.mean:.{decimals}f} ± {value.error:.{decimals}f}"


def _decimals(x: float, digits: int) -> int:
    """Return how many decimals show `digits` significant digits of x, 6 at most."""
    exponent = int(f"{abs(x):e}".partition("e")[2])
    return max(0, min(6, digits - 1 - exponent))
