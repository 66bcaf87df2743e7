"""``kvq eval``: what a quantised cache does to a model's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq_vllm.cli.output import print_json
from kvq_vllm.errors import KVQError

if TYPE_CHECKING:
    from kvq_vllm.evaluation import Evaluation, Progress

EXAMPLES = """
Examples:

  kvq eval MODEL                                    every format the platform has

  kvq eval MODEL --formats kvq-int8,kvq-int4        only these

  kvq eval MODEL --quick                            a first look

  kvq eval MODEL --text my.txt --context 8000       with your own text

  kvq eval MODEL --formats kvq-int4 --kvq '{"unit_size": 256}' --json
"""


def eval_command(
    model: Annotated[Path, typer.Argument(help="Folder of the model (Hugging Face form).")],
    formats: Annotated[
        str | None, typer.Option(help="Cache dtypes, with commas between; default: all.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less of everything: a first look.")
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(help="next-token, citation, multi-turn, generation; default: all."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results; default: kvq-eval-MODEL.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Your own text, UTF-8.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts per task.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per prompt.")] = None,
    generate: Annotated[int | None, typer.Option(help="Tokens per long generation.")] = None,
    dtype: Annotated[str, typer.Option(help="The model's dtype, as for vLLM.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    kvq: Annotated[
        str, typer.Option(help='JSON for additional_config["kvq"].', metavar="JSON")
    ] = "{}",
    engine: Annotated[
        str, typer.Option(help="JSON of more arguments for vLLM's LLM.", metavar="JSON")
    ] = "{}",
    report: Annotated[bool, typer.Option(help="Write report.html and its plots.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(help="Exit with 1 if a format is this bad: usable or broken."),
    ] = None,
) -> None:
    """Compare cache dtypes with the unquantised cache on one model.

    Runs the model in vLLM with `auto` and with each cache dtype: next-token predictions,
    citation from long context, long conversations and long generation. Prints a verdict for
    each - safe, usable or broken - and what it rests on. An interrupted run goes on where it
    was when started again.
    """
    from kvq_vllm.evaluation import FULL, QUICK, TASKS, Settings, Size, evaluate
    from kvq_vllm.evaluation.report import check_requirements, write_report

    if fail_on not in (None, "usable", "broken"):
        raise KVQError(f"--fail-on is {fail_on} but must be usable or broken.")
    base = QUICK if quick else FULL
    settings = Settings(
        model=model,
        size=Size(
            prompts=base.prompts if prompts is None else prompts,
            context=base.context if context is None else context,
            generated=base.generated if generate is None else generate,
        ),
        tasks=tuple(tasks.split(",")) if tasks else TASKS,
        text=text,
        dtype=dtype,
        seed=seed,
        kvq=_json_object("--kvq", kvq),
        engine=_json_object("--engine", engine),
    )
    if report:
        check_requirements()
    folder = out or Path(f"kvq-eval-{model.resolve().name}")
    with _ProgressBars() as bars:
        result = evaluate(settings, formats.split(",") if formats else None, folder, bars.show)
    page = None
    if report:
        page = write_report(result, folder)
    if as_json:
        print_json(result)
    else:
        _print(result)
        if page:
            typer.echo(f"\nReport: {page}")
    if fail_on and any(f.verdict.rank >= _rank(fail_on) for f in result.formats):
        raise typer.Exit(1)


def _rank(verdict: str) -> int:
    from kvq_vllm.evaluation import Verdict

    return Verdict(verdict).rank


def _json_object(option: str, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise KVQError(f"{option} is not valid JSON ({error}).") from None
    if not isinstance(parsed, dict):
        raise KVQError(f'{option} must be a JSON object such as {{"name": 1}}.')
    return parsed


class _ProgressBars:
    """One bar per engine and task, on standard error; one line where that is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("{task.description:34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self.bars.disable = not self.bars.console.is_terminal
        self.current: Any = None
        self.what: tuple[str, str] | None = None

    def __enter__(self) -> _ProgressBars:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.what is not None:
            self.bars.stop()

    def show(self, progress: Progress) -> None:
        if self.what is None:  # not before: an error that comes first shall have its line alone
            self.bars.start()
        what = (progress.cache_dtype, progress.task)
        if what != self.what:
            if self.current is not None:  # "starting" has no end of its own
                total = self.bars.tasks[self.current].total
                self.bars.update(self.current, completed=total)
            if self.bars.disable:
                self.bars.console.print(" ".join(what))
            self.current = self.bars.add_task(" ".join(what), total=progress.total)
            self.what = what
        self.bars.update(self.current, completed=progress.done)


def _print(result: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvq_vllm.evaluation import CRITERIA, TASKS
    from kvq_vllm.evaluation.report import show

    console = Console()
    colours = {"safe": "green", "usable": "yellow", "broken": "red", "not informative": "dim"}
    table = Table(title=f"{result.model}, compared with auto; mean ± standard error over prompts")
    table.add_column("measure", width=max(len(name) for name in TASKS) + 1)
    for f in result.formats:
        table.add_column(f.cache_dtype, justify="right")
    table.add_column("safe\nup to", justify="right")
    table.add_column("broken\nabove", justify="right")
    for criterion in CRITERIA:
        findings = [x for f in result.formats for x in f.findings if x.criterion == criterion]
        if findings:
            cells = [
                f"[{colours[x.verdict]}]{show(x.estimate) if x.estimate else '-'}[/]"
                for x in findings
            ]
            label = f"{criterion.task}:\n{criterion.name}"
            table.add_row(label, *cells, f"{criterion.safe:g}", f"{criterion.broken:g}")
    console.print(table)
    for f in result.formats:
        console.print(
            f"\n[bold {colours[f.verdict]}]{f.cache_dtype}: {f.verdict}[/]", highlight=False
        )
        for reason in f.reasons:
            console.print(f"  {reason}", highlight=False, markup=False)
    for name, why in result.unavailable.items():
        console.print(f"\n{name}: not available here. {why}", highlight=False, markup=False)
