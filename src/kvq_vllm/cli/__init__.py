"""The command line, ``kvq``.

One module per command, thin: it reads options, calls the function that does the work, and
prints. Conventions of all commands:

- ``--json`` prints one JSON document on stdout and nothing else there.
- Exit status 0: done; 1: done, and the answer is no; 2: it could not be done, with one line on
  stderr that says why; 130: interrupted.
- A module of this package imports neither PyTorch nor vLLM at its top, so that ``kvq --help``
  answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvq_vllm.cli import bench, doctor, plan
from kvq_vllm.cli import eval as eval_
from kvq_vllm.errors import KVQError

# Its place depends on Typer's release; all errors of usage have it as their base.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="kvq",
    help="Plan, check and measure quantised KV caches for vLLM.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvq_vllm import __version__

        typer.echo(f"kvq-vllm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Plan, check and measure quantised KV caches for vLLM."""


app.command("plan", help=plan.HELP)(plan.command)
app.command("doctor", help=doctor.HELP)(doctor.command)
app.command("eval", epilog=eval_.EXAMPLES)(eval_.eval_command)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench_command)


def main() -> None:
    """Run ``kvq``; errors of ours and of usage become one line on stderr and exit status 2."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="kvq", standalone_mode=False))
    except KVQError as error:
        message = str(error)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "kvq"
        message = f"{error.format_message().rstrip('.')}: see `{command} --help`."
    print(f"kvq: {message}", file=sys.stderr)
    sys.exit(2)
