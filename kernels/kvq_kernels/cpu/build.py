"""Compile the C++ kernels: ``python -m kvq_kernels.cpu.build``.

The installation from source does it by itself (``setup.py``); run it by hand after installing a
compiler or changing a source file. Standard library only, because the isolated environments in
which packages are built have no PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
LIBRARY_NAME = "libkvq_cpu.so"
KERNEL_SOURCES: tuple[str, ...] = ("seal.cpp", "decode.cpp", "prefill.cpp", "fp8.cpp")

# -ffp-contract=off: the codes must not depend on whether a compiler fuses a product and a sum.
# Never -ffast-math: it makes a shared library set flush-to-zero for the whole process.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"),
]
X86_ISAS = {
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni "
    "-Wno-uninitialized -Wno-maybe-uninitialized -Wno-unknown-warning-option",  # GCC's own header
}
"""Instruction set to compiler flags; ``portable`` needs none."""
AMX_FLAGS = f"{X86_ISAS['avx512']} -mavx512bf16 -mamx-tile -mamx-bf16"
"""For prefill only; the other kernels are those for AVX-512."""


class BuildError(Exception):
    """The kernels could not be compiled; the message says why."""


def source_hash(directory: Path = SOURCE_DIR) -> str | None:
    """Return a hash of the C++ sources in `directory`, or None where there are none."""
    sources = sorted(p for p in directory.iterdir() if p.suffix in (".cpp", ".h"))
    if not sources:
        return None
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX, or the first of c++, g++ and clang++.

    Raises:
        BuildError: there is none.

    """
    if command := os.environ.get("CXX", "").split():
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found: install g++ or clang++, or set CXX")


def build(output: Path, extra_flags: Sequence[str] = ()) -> None:
    """Compile and link the library.

    Args:
        output: path of the library.
        extra_flags: for the compiler and the linker, after our own.

    Raises:
        BuildError: there is no compiler, or it failed.

    """
    compiler = find_compiler()
    sources = {"portable": ("", KERNEL_SOURCES)}
    defines = [f'-DKVQ_SOURCE_HASH="{source_hash()}"']
    with tempfile.TemporaryDirectory() as directory:
        if platform.machine().lower() in ("x86_64", "amd64"):
            sources |= {isa: (isa_flags, KERNEL_SOURCES) for isa, isa_flags in X86_ISAS.items()}
            defines.append("-DKVQ_WITH_X86")
            if _knows_amx(compiler, Path(directory)):
                sources["amx"] = (AMX_FLAGS, ("prefill.cpp",))
                defines.append("-DKVQ_WITH_AMX")
        threads = _openmp_flags(compiler, Path(directory))
        flags = [*FLAGS, *threads, *defines, *extra_flags]
        commands = [_compile_command(compiler, flags, "dispatch.cpp", "dispatch", directory)]
        for isa, (own_flags, isa_sources) in sources.items():
            isa_flags = [*flags, *own_flags.split(), f"-DKVQ_NAME(op)=kvq_##op##_{isa}"]
            for source in isa_sources:
                name = f"{Path(source).stem}_{isa}"
                commands.append(_compile_command(compiler, isa_flags, source, name, directory))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        objects = [command[-1] for command in commands]
        linked = Path(directory) / LIBRARY_NAME
        _run([*compiler, "-shared", *threads, *extra_flags, *objects, "-o", str(linked)])
        output.parent.mkdir(parents=True, exist_ok=True)
        # Replace rather than overwrite: a running process may have the old file mapped.
        staged = output.with_name(f".{output.name}.{os.getpid()}")
        shutil.copyfile(linked, staged)
        os.replace(staged, output)


def _compile_command(
    compiler: list[str], flags: list[str], source: str, name: str, directory: str
) -> list[str]:
    target = str(Path(directory) / f"{name}.o")
    return [*compiler, *flags, "-c", str(SOURCE_DIR / source), "-o", target]


def _knows_amx(compiler: list[str], directory: Path) -> bool:
    """Whether the compiler is new enough for AMX: GCC 11 and Clang 12 are."""
    probe = directory / "amx.cpp"
    probe.write_text("#include <immintrin.h>\nvoid probe() { _tile_release(); }\n")
    try:
        _run([*compiler, *AMX_FLAGS.split(), "-c", str(probe), "-o", f"{probe}.o"])
    except BuildError:
        return False
    return True


def _openmp_flags(compiler: list[str], directory: Path) -> list[str]:
    """Return the flags for OpenMP; none, with a note, where the compiler lacks it.

    Raises:
        BuildError: the compiler does not work at all.

    """
    probe = directory / "probe.cpp"
    probe.write_text("int probe() { return 0; }\n")
    command = [*compiler, "-shared", "-fPIC", str(probe), "-o", f"{probe}.so"]
    _run(command)
    probe.write_text("#include <omp.h>\nint probe() { return omp_get_max_threads(); }\n")
    try:
        _run([*command, "-fopenmp"])
    except BuildError as error:
        print(f"kvq: CPU kernels will use one thread, no OpenMP: {error}", file=sys.stderr)
        return []
    return ["-fopenmp"]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the C++ kernels.")
    parser.add_argument("--output", type=Path, default=SOURCE_DIR / LIBRARY_NAME)
    parser.add_argument(
        "--flags", default="", help='more compiler flags, e.g. "-g -O1 -fsanitize=address"'
    )
    options = parser.parse_args()
    try:
        build(options.output, options.flags.split())
    except BuildError as error:
        sys.exit(f"kvq: the CPU kernels were not built: {error}")
    print(f"built {options.output}")


if __name__ == "__main__":
    main()
