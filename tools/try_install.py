#!/usr/bin/env python3
"""Install the project into a bare environment, as the README says, and try every command there.

    make try-install

Each command must do what a new user expects: end with its exit status, and where it cannot work,
say why in one line without a traceback. Takes some minutes; prints a line per command, and ends
with 1 where one of them surprised.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from setup_env import MODEL, ROOT, TORCH, UNWANTED

SMALL_EVAL = shlex.split("--prompts 2 --context 512 --generate 64 --formats kvq-int4")
SMALL_BENCH = shlex.split(
    "--formats auto,kvq-int4 --requests 4 --concurrency 2 --input-tokens 64 --output-tokens 16 "
    "--rounds 1"
)
SERVER = "--enforce-eager --max-model-len 2048"


@dataclass(frozen=True)
class Trial:
    """One command, and what it must do.

    Attributes:
        words: after ``kvq``.
        status: exit status.
        says: part of its output; of the one line of standard error where it fails.

    """

    words: tuple[str, ...]
    status: int
    says: str


def trials(folder: Path) -> list[Trial]:
    """Return what is tried; models without weights are written into `folder`."""
    model = str(MODEL)
    wide = _write_model(folder / "wide", head_dim=512)
    odd = _write_model(folder / "odd", architectures=["NoSuchModel"])
    return [
        Trial(("--version",), 0, "kvq-vllm"),
        Trial(("doctor",), 0, "registered"),
        Trial(("plan", model, "--memory", "24GiB"), 0, "kvq-int4"),
        Trial(("plan", model, "--json"), 0, '"formats"'),
        Trial(("plan", wide), 0, "kvq formats do not serve this model"),
        Trial(("eval", model, *SMALL_EVAL, "--out", str(folder / "eval")), 0, "kvq-int4:"),
        Trial(("bench", model, *SMALL_BENCH, "--server-args", SERVER), 0, "kvq-int4"),
        # What cannot work.
        Trial(("plan", "/no/such/model"), 2, "neither a folder with a config.json"),
        Trial(("plan",), 2, "Give either MODEL"),
        Trial(("plan", str(folder)), 2, "has no config.json"),
        Trial(("plan", model, "--kv-cache-memory", "64KiB"), 2, "Not one request"),
        Trial(("eval", "/no/such/model"), 2, "is not a folder"),
        Trial(("eval", model, "--formats", "kvq-int3"), 2, "There is no format kvq-int3"),
        Trial(("eval", odd, "--no-report"), 2, "NoSuchModel"),
        Trial(("bench", "/no/such/model"), 2, "is not a folder"),
        Trial(("bench", wide, "--formats", "kvq-int4"), 2, "head size 512"),
    ]


def _write_model(folder: Path, **changes: object) -> str:
    """Write SmolLM2's configuration with `changes`, and its tokenizer, without weights."""
    folder.mkdir()
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    for file in MODEL.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def install(folder: Path) -> Path:
    """Make an environment as the README's "Set-up on a CPU" does; return its folder of programs."""
    programs = folder / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for words in (
        [sys.executable, "-m", "venv", str(programs.parent)],
        [*pip, "install", TORCH],
        [*pip, "install", f"{ROOT}[cpu,plots]"],
        [*pip, "uninstall", "-y", *UNWANTED],
    ):
        subprocess.run(words, check=True, env=_environment())
    return programs


def _environment() -> dict[str, str]:
    mine = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return mine | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "200"}


def run(kvq: Path, trial: Trial, folder: Path) -> str | None:
    """Run one command; return what was wrong, or None."""
    result = subprocess.run(
        [str(kvq), *trial.words], capture_output=True, text=True, cwd=folder, env=_environment()
    )
    if result.returncode != trial.status:
        return f"exit status {result.returncode}: {result.stderr[-500:]}"
    if "Traceback" in result.stderr:
        return f"a traceback: {result.stderr[-500:]}"
    if trial.status == 0:
        return None if trial.says in result.stdout else f"does not say {trial.says!r}"
    # Bars of progress may stand before it.
    *_, last = result.stderr.splitlines() or [""]
    if not last.startswith("kvq: ") or trial.says not in last:
        return f"does not end in one line that says {trial.says!r}: {result.stderr[-500:]}"
    return None


def main() -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = time.monotonic()
        kvq = install(folder) / "kvq"
        print(f"installed in {time.monotonic() - start:.0f} s", flush=True)
        for trial in trials(folder):
            start = time.monotonic()
            problem = run(kvq, trial, folder)
            wrong += problem is not None
            seconds = f"{time.monotonic() - start:.0f} s"
            print(
                f"{'ok' if problem is None else 'WRONG':5} kvq {' '.join(trial.words)} ({seconds})"
            )
            if problem:
                print(f"      {problem}")
            sys.stdout.flush()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
