"""Compile the C++ kernels into the package; everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU_DIR = Path(__file__).parent / "kernels" / "kvq_kernels" / "cpu"

# By its path: importing the package would need PyTorch, which is not there while building.
_spec = importlib.util.spec_from_file_location("kvq_cpu_build", CPU_DIR / "build.py")
cpu_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cpu_build)


class BuildKernels(build_ext):
    """Builds one plain shared library, loaded with ctypes, instead of a Python extension."""

    def get_ext_filename(self, fullname: str) -> str:
        *package, _ = fullname.split(".")
        return str(Path(*package, cpu_build.LIBRARY_NAME))

    def build_extension(self, ext: Extension) -> None:
        try:
            cpu_build.build(Path(self.get_ext_fullpath(ext.name)))
        except cpu_build.BuildError as error:
            print(
                "\nkvq: NOTE: the C++ kernels were NOT built; on CPUs the slow reference kernels "
                f"will be used.\nkvq: {error}\nkvq: Later: python -m kvq_kernels.cpu.build\n",
                file=sys.stderr,
            )


setup(
    ext_modules=[
        # `optional`: an editable installation then does not insist on the file either.
        Extension(
            "kvq_kernels.cpu.libkvq_cpu",
            sources=[f"kernels/kvq_kernels/cpu/{p.name}" for p in sorted(CPU_DIR.glob("*.cpp"))],
            depends=[f"kernels/kvq_kernels/cpu/{p.name}" for p in sorted(CPU_DIR.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
