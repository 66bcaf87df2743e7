"""``kvq doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvq_vllm.cli.output import print_json

HELP = """
Check whether quantised caches work here, and say what to do where they do not.

One line per finding; exit status 1 if anything failed. Takes up to a minute, because vLLM and
every kernel are really run.

[bold]Examples[/bold]

  kvq doctor

  kvq doctor --json
"""

_MARKS = {"ok": "[green]ok[/green]     ", "warning": "[yellow]warning[/yellow]"}
_FAILURE = "[red]FAILURE[/red]"


def command(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape

    from kvq_vllm.diagnosis import diagnose

    console = Console(soft_wrap=True, highlight=False)
    findings = []
    with Console(stderr=True).status("Looking ..."):
        for finding in diagnose():
            findings.append(finding)
            if json:
                continue
            remedy = f" -> {finding.remedy}" if finding.remedy else ""
            mark = _MARKS.get(finding.status, _FAILURE)
            console.print(f"{mark} {finding.subject}: {escape(finding.message + remedy)}")
    if json:
        print_json([asdict(finding) for finding in findings])
    if any(finding.status == "failure" for finding in findings):
        raise typer.Exit(1)
