"""What the compiler makes of sealing and prefill must not get worse."""

import pytest

from benchmarks import compile_report
from kvq_kernels.triton.common import is_interpreted

pytestmark = pytest.mark.skipif(is_interpreted(), reason="the interpreter compiles nothing")


def _report(kernel: str, target: str) -> compile_report.Row:
    cases = [*compile_report.store_cases(), *compile_report.prefill_cases()]
    case = next(c for c in cases if c.quick and c.kernel == kernel and c.fmt.name == "kvq-int4")
    return compile_report.report(case, target)


def test_store_does_not_spill() -> None:
    assert _report("store", "sm_90").spill_bytes == 0


def test_prefill_multiplies_on_tensor_cores_and_loads_wide() -> None:
    row = _report("prefill", "sm_90")
    assert row.spill_bytes == 0
    assert row.wide_bytes >= row.tokens * 128, "codes, two nibbles a channel, come in 128-bit loads"
    assert row.mma.startswith("HGMMA")
