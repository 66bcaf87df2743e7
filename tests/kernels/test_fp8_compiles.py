"""The Triton kernels of the fp8 formats compile for GPUs that are not here."""

from __future__ import annotations

import pytest

from benchmarks.compile_report import TARGETS, fp8_cases, record
from kvq_kernels.triton.common import is_interpreted

pytestmark = pytest.mark.skipif(is_interpreted(), reason="the interpreter compiles nothing")


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize(
    "case",
    [case for case in fp8_cases() if case.quick],
    ids=lambda case: f"{case.kernel}-{case.fmt.name}",
)
def test_kernels_compile(case, target: str) -> None:  # type: ignore[no-untyped-def]
    with record(target) as launches:
        case.launch()
    launch = next(each for each in launches if each.kernel.__name__ == case.function)
    compiled = launch.compile(TARGETS[target])
    assert compiled.metadata.shared <= 64 * 1024
    if case.function == "_attend" and target != "gfx942":
        conversion = "f16x2.e4m3x2" if "e4m3" in case.fmt.name else "f16x2.e5m2x2"
        assert (conversion in compiled.asm["ptx"]) == (target == "sm_90")
