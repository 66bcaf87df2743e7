"""The report in a browser: all there, nothing loaded from elsewhere, no errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.records import FORMATS

from kvq_vllm.errors import KVQError
from kvq_vllm.evaluation import Evaluation
from kvq_vllm.evaluation.report import check_requirements, write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def report(evaluation: Evaluation, tmp_path: Path) -> Path:
    return write_report(evaluation, tmp_path)


def test_the_page_stands_alone_and_escapes(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    for address in ('src="', "@import", "<script", 'href="http'):
        assert address not in page.replace('xlink:href="#', "")
    assert "<b>bad</b>" not in page
    assert "&lt;b&gt;bad" in page
    assert "no &lt;fp8&gt;" in page
    for name in ("kl-by-position", "citation-by-depth", "generation-drift"):
        png = (report.parent / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        assert len(png) > 5000


def test_what_is_missing_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    check_requirements()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KVQError, match=r"needs jinja2: pip install .* or use --no-report"):
        check_requirements()


@pytest.fixture
def browser() -> Iterator[Any]:
    if BROWSER is None:
        if os.environ.get("CI"):
            pytest.fail("continuous integration must have Chromium: see .ci/run")
        pytest.skip("Chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


def test_in_a_browser(report: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())

    assert page.title() == "model<i>: quantised KV caches"
    names = page.locator("#verdicts tbody tr td:first-child").all_inner_texts()
    assert names == [*FORMATS, "fp8"]
    verdicts = page.locator("#verdicts tbody tr td:nth-child(2)").all_inner_texts()
    assert verdicts == ["safe", "broken", "not available"]
    assert page.locator("#measures tbody tr").count() == 11
    plots = page.locator("figure svg")
    assert plots.count() == 3
    for i in range(3):
        box = plots.nth(i).bounding_box()
        assert box["width"] > 500
        assert box["height"] > 200
        # Every format has a line, and the legend its name.
        for name in FORMATS:
            assert name in plots.nth(i).text_content()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert problems == []
    outside = [url for url in requests if not url.startswith(("file:", "data:"))]
    assert outside == []
