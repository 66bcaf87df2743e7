"""What all commands share: fast help, one-line errors, exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from kvq_vllm import cli
from kvq_vllm.errors import KVQError


def kvq(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvq`` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "kvq_vllm.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from kvq_vllm.cli import app\n"
        "try: app(['--help'])\n"
        "finally: print(sorted({'torch', 'vllm', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Usage: " in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plans"], "No such command 'plans'"),
        (["plan", "--nope"], "No such option: --nope"),
        (["eval"], "Missing argument"),
        (["bench", "--rounds", "0"], "--rounds"),
        (["plan", "--layers", "many"], "--layers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    result = kvq(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvq: ")
    assert says in line
    assert line.endswith(" --help`.")


def test_without_arguments_it_prints_the_help() -> None:
    assert kvq().stdout == kvq("--help").stdout


def test_version() -> None:
    result = kvq("--version")
    assert (result.returncode, result.stdout.split()[0]) == (0, "kvq-vllm")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """An app whose command `run` runs, in the place of ours."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["kvq", "run"])
    return app


def run_main(capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code, capsys.readouterr().err


def test_our_errors_are_one_line_and_status_2(
    app: typer.Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    @app.command()
    def run() -> None:
        raise KVQError("It is broken: mend it.")

    assert run_main(capsys) == (2, "kvq: It is broken: mend it.\n")


def test_an_interrupt_is_status_130_without_traceback(
    app: typer.Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    @app.command()
    def run() -> None:
        raise KeyboardInterrupt

    status, err = run_main(capsys)
    assert status == 130
    assert "Traceback" not in err


def test_other_errors_keep_their_traceback(app: typer.Typer) -> None:
    @app.command()
    def run() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.main()
