"""docs/models.md says what the registry of models and the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.model_matrix import FORMATS, MODELS

from tools import support_matrix


def table(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def report(folder: Path, broken: str = "") -> Path:
    """A JUnit report in which all is as the registry says; one model may be broken."""
    cases = []
    for model in MODELS:
        for name in FORMATS:
            found = {"model": model.name, "format": name}
            if model.refusal:
                found["refusal"] = f"{name} does not support {model.special}."
            properties = "".join(f'<property name="{k}" value="{v}"/>' for k, v in found.items())
            failure = "<failure/>" if model.name == broken else ""
            cases.append(f"<testcase><properties>{properties}</properties>{failure}</testcase>")
    path = folder / "results.xml"
    path.write_text(f"<testsuite><testcase/>{''.join(cases)}</testsuite>")
    return path


def test_the_page_lists_every_model_and_format() -> None:
    header, _, *rows = table(support_matrix.PAGE.read_text(encoding="utf-8"))
    assert header == ["model", "what is special", *(f"`{name}`" for name in FORMATS)]
    expected = [
        [model.name, model.special, *["refused" if model.refusal else "yes"] * len(FORMATS)]
        for model in MODELS
    ]
    assert rows == expected, "run `make support-matrix`"


def test_the_page_is_made_from_results(tmp_path: Path) -> None:
    page = support_matrix.page(support_matrix.read_results(report(tmp_path)))
    assert len(table(page)) == 2 + len(MODELS)
    assert "- BERT: kvq-int8 does not support encoder only." in page


def test_a_failed_or_missing_test_makes_no_page(tmp_path: Path) -> None:
    results = support_matrix.read_results(report(tmp_path, broken="Phi 3"))
    with pytest.raises(SystemExit, match=r"Phi 3.*failed"):
        support_matrix.page(results)
    with pytest.raises(SystemExit, match=r"no result for .*Phi 3"):
        support_matrix.page({pair: r for pair, r in results.items() if pair[0] != "Phi 3"})
