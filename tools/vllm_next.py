#!/usr/bin/env python3
"""Make `.venv-next/overlay`: the next vLLM for tests on a CPU.

    python3 tools/vllm_next.py
    PYTHONPATH=.venv-next/overlay .venv/bin/python -m pytest

There is no CPU build of this vLLM yet. The overlay has the Python sources of its CUDA wheel
over the compiled libraries of the CPU build in `.venv`. That is good enough to test what our
plugin touches, which is Python; it says nothing about vLLM's own new kernels.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from setup_env import (
    PYTHON,
    ROOT,
    TORCH,
    VENV,
    VLLM,
    SetupError,
    digest,
    download_wheel,
    environment_is_current,
    locked,
    pip,
    run,
    step,
    write_dist_info,
)

VERSION = "0.33.0"
# What its server needs beyond what the CPU build in `.venv` brings.
EXTRAS = ("orjson",)
NEXT = ROOT / ".venv-next"
OVERLAY = NEXT / "overlay"
STAMP = OVERLAY / "overlay.stamp"
# Compiled for CUDA, or sources that only CUDA's compiler reads.
SKIPPED_SUFFIXES = {".so", ".h", ".hpp", ".inl", ".cuh", ".cu", ".cpp"}
SKIPPED_FILES = {"vllm/vllm-rs"}

CHECK = f"""
import vllm
from vllm.platforms import current_platform
import vllm._custom_ops
import vllm.entrypoints.openai.api_server
assert vllm.__version__ == {VERSION!r}, vllm.__version__
assert current_platform.is_cpu(), current_platform
"""


def stamp() -> str:
    return digest(Path(__file__), VERSION, VLLM, TORCH)


def is_current() -> bool:
    return STAMP.is_file() and STAMP.read_text() == stamp()


def extract_sources(wheel: Path, out: Path) -> None:
    """Extract the package `vllm` of a wheel, without what is compiled."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.startswith("vllm/") or name in SKIPPED_FILES:
                continue
            if Path(name).suffix not in SKIPPED_SUFFIXES:
                archive.extract(name, out)


def link_libraries(out: Path) -> None:
    """Put the compiled libraries of `.venv`'s vLLM at the same places in the overlay."""
    (site,) = VENV.glob("lib/python3*/site-packages")
    for library in (site / "vllm").rglob("*.so"):
        target = out / library.relative_to(site)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(library, target)
        except OSError:  # another file system, or one without hard links
            shutil.copy2(library, target)


def build(work: Path) -> None:
    """Build the overlay in a temporary folder, check it, and put it in place."""
    overlay = work / "overlay"
    overlay.mkdir()
    with step(f"downloading vllm=={VERSION}"):
        wheel = download_wheel(f"vllm=={VERSION}", work)
    with step("laying its sources over the compiled libraries of .venv"):
        extract_sources(wheel, overlay)
        link_libraries(overlay)
        # vLLM takes the CPU platform only where this version contains "cpu". The folder comes
        # first on sys.path, so this hides the version that .venv registers.
        write_dist_info(overlay, f"{VERSION}+cpu")
    with step(f"installing {', '.join(EXTRAS)} beside them"):
        pip("install", "--no-deps", "--target", str(overlay), *EXTRAS)
    with step("checking that it imports and finds the CPU"):
        run(
            PYTHON,
            "-c",
            CHECK,
            PYTHONPATH=str(overlay),
            hint=f"vLLM {VERSION} may need something that .venv does not have.",
        )
    (overlay / STAMP.name).write_text(stamp())
    shutil.rmtree(OVERLAY, ignore_errors=True)
    os.replace(overlay, OVERLAY)


def main() -> None:
    if not environment_is_current():
        raise SetupError("make the environment first, with tools/setup_env.py")
    NEXT.mkdir(exist_ok=True)
    with locked(NEXT):
        if not is_current():
            for leftover in NEXT.glob("work-*"):  # of a killed run
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=NEXT, prefix="work-") as work:
                build(Path(work))
    print(f"vllm {VERSION}: ready ({OVERLAY.relative_to(ROOT)})")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"vllm_next: {error}")
