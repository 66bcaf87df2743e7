"""``kvq eval`` and ``kvq bench`` with engines: a tiny random model through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models import smollm2, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a real tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = json.loads((smollm2() / "config.json").read_text())["vocab_size"]
    tiny_llama(folder, vocab_size=vocabulary, tie_word_embeddings=True, dtype="float32")
    for file in smollm2().glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(smollm2() / "chat_template.jinja", folder)
    return folder


def kvq(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvq`` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "kvq_vllm.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The run failed as it should: status 2 and one line that says why."""
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("kvq: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in last


SMALL = ("--prompts", "2", "--context", "512", "--generate", "64", "--dtype", "float32")


def test_eval_measures_everything_once(model: Path, tmp_path: Path) -> None:
    # The example for continuous integration first, then the same again.
    options = ("--formats", "kvq-int8", *SMALL, "--json")
    check = Path(__file__).parents[2] / "examples" / "eval_in_ci" / "check.sh"
    first = subprocess.run(
        [check, model, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert first.returncode == 0, first.stderr
    (result,) = json.loads(first.stdout)["formats"]
    assert result["cache_dtype"] == "kvq-int8"
    estimates = {f["criterion"]["name"]: f["estimate"] for f in result["findings"]}
    assert 0 <= estimates["KL divergence"]["mean"] < 0.01
    assert result["by_position"][0]["values"]["kl"]["mean"] < 1e-6  # before the first unit
    # A random model cites nothing.
    assert estimates["answers lost"] is None

    out = tmp_path / "kvq-eval"
    assert (out / "report.html").exists()
    times = {file: file.stat().st_mtime_ns for file in out.glob("*/*.json")}
    assert len(times) == 2 * 5  # four tasks and the judge's
    again = kvq("eval", model, "--out", out, *options)
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert {file: file.stat().st_mtime_ns for file in out.glob("*/*.json")} == times

    other = kvq("eval", model, "--out", out, *options, "--seed", "1")
    assert_one_line(other, "holds results of another model", "--out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--formats", "kvq-int4", "--kvq", '{"unit_size": 96}'), ("unit_size is 96",)),
        (("--formats", "kvq-int4", "--kvq", "{"), ("--kvq is not valid JSON",)),
        (("--formats", "int5"), ("auto", "int5")),
        (("--text", "/nowhere"), ("--text /nowhere cannot be read",)),
        (("--fail-on", "ugly"), ("--fail-on is ugly",)),
    ],
)
def test_options_that_cannot_work(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    out = ("--out", tmp_path / "run", "--tasks", "citation")
    assert_one_line(kvq("eval", model, *SMALL, *out, *arguments), *words)


def test_a_model_that_is_not_there() -> None:
    assert_one_line(kvq("eval", "/nowhere"), "/nowhere is not a folder")
    assert_one_line(kvq("bench", "/nowhere"), "/nowhere is not a folder")


def test_a_model_that_vllm_does_not_know(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unknown"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    result = kvq("eval", folder, *SMALL, "--out", tmp_path / "run", "--formats", "kvq-int8")
    assert_one_line(result, "NoSuchModel", "log.txt")


def test_no_memory_for_the_context(model: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run", "--formats", "kvq-int8")
    few = ("--engine", '{"num_gpu_blocks_override": 1}')
    assert_one_line(kvq("eval", model, *SMALL, *out, *few), "No available memory for the cache")


def test_bench_compares_two_servers(model: Path) -> None:
    result = kvq(
        "bench", model, "--formats", "auto,kvq-int4", "--rounds", "1", "--requests", "4",
        "--concurrency", "2", "--input-tokens", "300", "--output-tokens", "8",
        "--server-args", "--dtype float32 --enforce-eager --max-model-len 2048", "--json",
        VLLM_CPU_KVCACHE_SPACE="1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows: list[dict[str, Any]] = json.loads(result.stdout)["results"]
    assert [row["name"] for row in rows] == ["auto", "kvq-int4"]
    assert [row["capacity"]["cache_dtype"] for row in rows] == ["auto", "kvq-int4"]
    auto, int4 = (row["capacity"] for row in rows)
    assert int4["tokens"] > 1.5 * auto["tokens"]
    assert int4["max_concurrency"] > auto["max_concurrency"]
    for row in rows:
        (measured,) = row["rounds"]
        assert min(measured.values()) > 0
    assert rows[0]["throughput_ratio"] == 1
