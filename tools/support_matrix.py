"""Write docs/models.md from the results of the tests that try every model with every format.

    python tools/support_matrix.py RESULTS.xml...

RESULTS.xml are pytest's JUnit reports of these tests; `make support-matrix` does both.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.model_matrix import FORMATS, MODELS, ModelKind  # noqa: E402

SERVED, REFUSED = "yes", "refused"

HEAD = """# Models

What `make support-matrix` found: every kind of model below, tiny and random, was served with every
format on vLLM's CPU build, with chunked prefill and several requests at once. **yes**: the tokens
are the choices of a dense reference, Hugging Face's model with the same quantisation and no pages,
chunks or batches; sums in another order may tip one of 180. **refused**: the engine does not start,
and says why before it loads weights.

"""


@dataclass(frozen=True)
class Result:
    """What a test found.

    Attributes:
        cell: "yes", "refused" or "failed".
        message: of a refusal.

    """

    cell: str
    message: str = ""


Results = Mapping[tuple[str, str], Result]


def read_results(*reports: Path) -> Results:
    """Read JUnit reports: (model, format) to result, of the tests that name both."""
    results = {}
    for case in (c for path in reports for c in ElementTree.parse(path).iter("testcase")):
        properties = {p.get("name"): p.get("value", "") for p in case.iter("property")}
        if "model" not in properties:
            continue
        if any(case.find(tag) is not None for tag in ("failure", "error", "skipped")):
            result = Result("failed")
        elif "refusal" in properties:
            result = Result(REFUSED, properties["refusal"])
        else:
            result = Result(SERVED)
        results[properties["model"], properties["format"]] = result
    return results


def page(results: Results) -> str:
    """Return the page.

    Raises:
        SystemExit: a model was not tried with a format, or failed.

    """
    wanted = [(model.name, name) for model in MODELS for name in FORMATS]
    if missing := [pair for pair in wanted if pair not in results]:
        raise SystemExit(f"no result for {missing}: run `make support-matrix`")
    if failed := [pair for pair in wanted if results[pair].cell == "failed"]:
        raise SystemExit(f"the tests of {failed} failed: mend them first")
    formats = [f"`{name}`" for name in FORMATS]
    lines = [
        row("model", "what is special", *formats),
        row("---", "---", *(":-:" for _ in FORMATS)),
        *(
            row(model.name, model.special, *(results[model.name, name].cell for name in FORMATS))
            for model in MODELS
        ),
    ]
    refused = [model for model in MODELS if model.refusal is not None]
    return HEAD + "\n".join(lines) + "\n\n## Refusals\n\n" + reasons(refused, results) + "\n"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def reasons(refused: list[ModelKind], results: Results) -> str:
    """Quote what the engine says of each refused model, for the first format."""
    name = FORMATS[0]
    return "\n".join(f"- {m.name}: {results[m.name, name].message}" for m in refused)


if __name__ == "__main__":
    PAGE.write_text(page(read_results(*map(Path, sys.argv[1:]))), encoding="utf-8")
    print(f"wrote {PAGE}")
