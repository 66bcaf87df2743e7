"""The GPU benchmark runs, all but its timing, so that it works the day there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_bench

SCRIPT = Path(gpu_bench.__file__)


def test_smoke() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, SCRIPT, "--interpret"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "3 configurations agree with float64" in result.stdout
    assert "no times" in result.stdout


def test_a_wrong_result_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever kernel it comes from."""
    shape = next(gpu_bench.tiny_shapes())
    decode = gpu_bench.kernels.decode

    def wrong(query, cache, batch, params, out) -> None:
        decode(query, cache, batch, params, out)
        out[-1, -1, 5] += 0.1

    monkeypatch.setattr(gpu_bench.kernels, "decode", wrong)
    with pytest.raises(SystemExit, match="WRONG RESULT"):
        gpu_bench.Step(shape).side("kvq-int4")


def test_wrong_records_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = next(s for s in gpu_bench.tiny_shapes() if s.op == "seal")
    seal = gpu_bench.kernels.seal

    def wrong(key, value, cache, batch) -> None:
        seal(key, 1.1 * value, cache, batch)

    monkeypatch.setattr(gpu_bench.kernels, "seal", wrong)
    with pytest.raises(SystemExit, match="WRONG RECORDS"):
        gpu_bench.Step(shape).side("kvq-int8")


def test_every_timed_configuration_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "INTERPRET", False)
    checked = {(c.format, c.head_size, c.gqa) for c in gpu_bench.checks()}
    for shape in gpu_bench.timed_shapes():
        assert {(name, shape.head_size, shape.gqa) for name in shape.formats} <= checked
