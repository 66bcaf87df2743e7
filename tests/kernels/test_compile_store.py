"""What the compiler makes of sealing and prefill must not get worse."""

import pytest

from benchmarks import compile_report
from kvq_kernels import Format
from kvq_kernels.triton import tuning
from kvq_kernels.triton.common import is_interpreted

pytestmark = pytest.mark.skipif(is_interpreted(), reason="the interpreter compiles nothing")


def _report(kernel: str, name: str, head_size: int, target: str) -> compile_report.Row:
    cases = [*compile_report.store_cases(), *compile_report.prefill_cases()]
    gqa = 4 if kernel == "prefill" else 1
    wanted = (kernel, name, head_size, gqa)
    case = next(c for c in cases if (c.kernel, c.fmt.name, c.fmt.head_size, c.gqa) == wanted)
    return compile_report.report(case, target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("name", ["kvq-int4", "kvq-k8v4"])
def test_store_does_not_spill(name: str, target: str) -> None:
    assert _report("store", name, 128, target).spill_bytes == 0


@pytest.mark.parametrize(
    ("head_size", "target", "spill_bytes", "instruction"),
    [
        (128, "sm_80", 0, "HMMA"),
        (128, "sm_90", 0, "HGMMA"),
        (256, "sm_80", 0, "HMMA"),
        (256, "sm_90", 56, "HGMMA"),  # 14 registers, once, while values are rotated back
    ],
)
def test_prefill(head_size: int, target: str, spill_bytes: int, instruction: str) -> None:
    row = _report("prefill", "kvq-int4", head_size, target)
    assert row.spill_bytes <= spill_bytes
    # A token's codes, two nibbles a channel, come in 128-bit loads.
    assert row.wide_bytes >= row.tokens * head_size
    assert row.mma.startswith(instruction)


@pytest.mark.parametrize("name", ["kvq-int4", "kvq-k8v4"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_what_triton_cannot_compile_is_never_chosen(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow tiles of wide heads' 4-bit values kill the process from 64 rows up."""
    small_groups = Format.create(name, 256, 128, 32)
    assert tuning.prefill_tuning(small_groups, arch).rows < 64
    monkeypatch.setitem(tuning.OVERRIDES, "prefill", {"sealed_tile": 32})
    with pytest.raises(ValueError, match="use fewer than 64 rows, or a tile of 64"):
        tuning.prefill_tuning(Format.create(name, 256), arch)
