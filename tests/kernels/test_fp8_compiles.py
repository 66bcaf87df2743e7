"""The Triton kernels of the fp8 formats compile for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_COMPILE = """
import sys
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvq_kernels.fp8 import triton as kernels

backend, arch, warp = sys.argv[1:]
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
POINTERS = {
    "query": "*bf16", "key": "*bf16", "value": "*bf16", "out": "*bf16", "sinks": "*bf16",
    "slopes": "*fp32", "pages": "*u8", "block_table": "*i32", "key_scale": "*fp32",
    "value_scale": "*fp32", "starts": "*i32", "lens": "*i32", "partial": "*fp32",
    "partial_stats": "*fp32", "scale": "fp32", "soft_cap": "fp32",
}

def build(kernel, **constants):
    signature, aligned, values = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
            continue
        signature[name] = POINTERS.get(name, "i32")
        if signature[name][0] == "*" or name.endswith("stride"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    return triton.compile(source, target=target, options={"num_warps": 4})

native = backend == "cuda" and int(arch) >= 89
for e4m3 in (True, False):
    build(kernels._write, STEPS=5, BLOCK_SIZE=16, HEAD_SIZE=96, PADDED=128, ROWS=8, E4M3=e4m3)
    for rows, splits in ((16, 8), (64, 1)):
        shape = dict(STEPS=5, HEAD_SIZE=128, PADDED=128, GROUP=4, QUERIES=rows // 4, ROWS=rows,
                     SPLITS=splits, SINKS=True)
        compiled = build(kernels._attend, BLOCK_SIZE=16, TILE=64, SOFT_CAP=True, WINDOW=True,
                         ALIBI=True, E4M3=e4m3, NATIVE=native, DOT_DTYPE=tl.float16, **shape)
        assert compiled.metadata.shared <= 64 * 1024, compiled.metadata.shared
        build(kernels._combine, READ_FACTOR=256.0, **(shape | {"SPLITS": 8}))
        if backend == "cuda":
            native_form = "e4m3x2" if e4m3 else "e5m2x2"
            assert (f"f16x2.{native_form}" in compiled.asm["ptx"]) == native, native_form
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda 80 32", "cuda 90 32", "hip gfx942 64"])
def test_kernels_compile(target: str) -> None:
    environment = os.environ | {"TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, *target.split()],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-2000:]
