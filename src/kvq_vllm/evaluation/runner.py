"""Runs the engines, one process each, and puts the results together."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from kvq_kernels.formats import DEBUG_FORMAT, DTYPE_PREFIX, SCHEMES
from kvq_vllm.config import KVQConfig, dtype_names
from kvq_vllm.errors import KVQError
from kvq_vllm.evaluation import text
from kvq_vllm.evaluation.files import RunFolder, write_json
from kvq_vllm.evaluation.results import Evaluation, evaluation_of
from kvq_vllm.evaluation.settings import BASELINE, Settings, Size
from kvq_vllm.evaluation.tasks import Tokenizer, build_prompts
from kvq_vllm.reading import read_config

IN_TREE = {"cpu": ("fp8",)}
"""vLLM's own quantised formats that are measured by default, by platform."""
IN_TREE_ELSEWHERE = ("fp8", "int8_per_token_head", "int4_per_token_head", "turboquant_4bit_nc")


@dataclass(frozen=True)
class Progress:
    """How far one engine is.

    Attributes:
        cache_dtype: of the engine.
        task: what it does; "starting" until it is ready.
        done: prompts or steps done.
        total: prompts or steps in all.

    """

    cache_dtype: str
    task: str
    done: int = 0
    total: int = 1


def evaluate(
    settings: Settings,
    formats: Sequence[str] | None,
    folder: Path,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Evaluation:
    """Measure cache dtypes against ``auto``; what the folder holds already is not measured again.

    Args:
        settings: what to measure.
        formats: values of ``--kv-cache-dtype``; None for every kvq format with scales of its own,
            and those of vLLM's own that the platform has.
        folder: where results are kept; created if need be.
        report: called as the work goes on.

    Raises:
        KVQError: the model, the text, the folder or vLLM is unusable, or an engine failed.

    """
    check_model(settings.model)
    KVQConfig.parse({"kvq": settings.kvq})
    check_formats(formats or ())
    require_vllm()
    optional = () if formats else _in_tree()
    chosen = list(dict.fromkeys(formats or [*optional, *SCHEMES]))
    settings = _fit_to_model(settings)
    run = RunFolder(folder)
    tokenizer = _load_tokenizer(settings.model)
    prompts = build_prompts(tokenizer, text.prose(settings.text), settings.size, settings.seed)
    run.start(settings, prompts, _versions())

    _run_engine(run, BASELINE, "measure", report)
    unavailable: dict[str, str] = {}
    for cache_dtype in [f for f in chosen if f != BASELINE]:
        try:
            _run_engine(run, cache_dtype, "measure", report)
        except KVQError as error:
            if cache_dtype not in optional:
                raise
            unavailable[cache_dtype] = str(error)
    if "generation" in settings.tasks and run.to_judge():
        _run_engine(run, BASELINE, "judge", report)
    measured = [f for f in chosen if f != BASELINE and f not in unavailable]
    evaluation = evaluation_of(run, measured, unavailable)
    write_json(folder / "results.json", evaluation.as_json())
    return evaluation


def check_model(model: Path) -> None:
    """Refuse what is no model's folder.

    Raises:
        KVQError: with what is missing.

    """
    if not model.is_dir():
        raise KVQError(
            f"{model} is not a folder: give the folder of a model in Hugging Face form "
            "(config.json, tokenizer and weights)."
        )
    if not (model / "config.json").is_file():
        raise KVQError(f"{model} has no config.json: it is no model in Hugging Face form.")


def require_vllm() -> None:
    """Refuse to go on without vLLM.

    Raises:
        KVQError: it is not installed, or does not work.

    """
    try:
        import vllm.platforms  # noqa: F401
    except ImportError as error:
        raise KVQError(
            f"vLLM cannot be imported ({error}): install kvq-vllm[cpu] or kvq-vllm[cuda]."
        ) from None


def check_formats(formats: Sequence[str]) -> None:
    for name in formats:
        if name.startswith(DTYPE_PREFIX) and name not in dtype_names():
            way_out = (
                "it is for debugging and needs KVQ_DEBUG_FORMATS=1"
                if name == DEBUG_FORMAT
                else f"choose from {', '.join(dtype_names())}"
            )
            raise KVQError(f"There is no format {name}: {way_out}.")


def _in_tree() -> tuple[str, ...]:
    from vllm.platforms import current_platform

    return IN_TREE.get(current_platform.device_type, IN_TREE_ELSEWHERE)


def _fit_to_model(settings: Settings) -> Settings:
    """Limit the prompts to what the model can hold."""
    config = read_config(settings.model / "config.json")
    limits = [
        part.get("max_position_embeddings")
        for part in (config, config.get("text_config"))
        if isinstance(part, dict)
    ]
    limit = min((x for x in limits if type(x) is int and x > 0), default=settings.size.context)
    size = settings.size
    fitted = Size(
        prompts=size.prompts,
        context=min(size.context, limit - 16),
        generated=min(size.generated, limit - 128),
    )
    return replace(settings, size=fitted)


def _load_tokenizer(model: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(model), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise KVQError(
            f"The tokenizer in {model} cannot be loaded ({_first_line(str(error))}) "
            "Check that the folder is complete."
        ) from None
    if not tokenizer.is_fast:
        raise KVQError(
            f"{model} has no tokenizer.json, which is needed to find the answers' tokens: save it "
            "once with transformers' AutoTokenizer."
        )
    return tokenizer


def _versions() -> dict[str, str]:
    """Return what the results depend on besides the settings."""
    import vllm

    import kvq_kernels

    kernels = Path(next(iter(kvq_kernels.__path__)))
    package = Path(__file__).parents[1]
    sources = [f for f in kernels.rglob("*") if f.suffix in (".py", ".cpp", ".h")]
    sources += [package / "backend.py", package / "residual.py"]
    digest = hashlib.sha256()
    for file in sorted(sources):
        digest.update(file.read_bytes())
    return {
        "kvq-vllm": version("kvq-vllm"),
        "vllm": vllm.__version__,
        "torch": version("torch"),
        "sources": digest.hexdigest()[:16],
    }


def _run_engine(
    run: RunFolder, cache_dtype: str, mode: str, report: Callable[[Progress], None]
) -> None:
    """Run one worker to its end, unless it has nothing to do.

    Raises:
        KVQError: it failed; with its own last word.

    """
    if mode == "measure" and all(
        run.has_result(cache_dtype, task) for task in run.settings().tasks
    ):
        return
    report(Progress(cache_dtype, "starting"))
    log = run.log(cache_dtype)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "kvq_vllm.evaluation.worker", str(run.path)]
    error: str | None = None
    with (
        log.open("w", encoding="utf-8") as output,
        subprocess.Popen(
            [*command, cache_dtype, mode],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=engine_environment(),
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                message = json.loads(line)
                error = message.get("error", error)
                if "done" in message:
                    report(Progress(cache_dtype, message["task"], message["done"], message["of"]))
        except BaseException:
            process.terminate()
            raise
        code = process.wait()
    if code:
        raise KVQError(f"{cache_dtype}: {_reason(error, code)} The full output is in {log}.")


def engine_environment() -> dict[str, str]:
    """Return the environment for an engine's process; what the user has set stays."""
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(cores),  # more make vLLM's CPU backend ten times slower
    }
    # In one process, an error has its own text rather than "see above".
    return defaults | os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _reason(error: str | None, code: int) -> str:
    """Return one sentence on why a worker ended."""
    if error:
        return _first_line(error)
    if code == -9:
        return (
            "the engine was killed, most likely for lack of memory: use a smaller --context, or "
            "on a CPU a smaller VLLM_CPU_KVCACHE_SPACE."
        )
    return f"the engine ended with status {code}."


def _first_line(error: str) -> str:
    """Return the line of an error that says most: of pydantic's, the first problem."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    problems = [line for line in lines if " [type=" in line]
    line = (problems or lines)[0].partition(" [type=")[0].removeprefix("Value error, ")
    line = textwrap.shorten(line, 300, placeholder=" …")  # vLLM lists every architecture it knows
    return line if line.endswith((".", "!")) else f"{line}."
