"""The OpenAI server, started both ways, on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import models
from support.models import smollm2
from support.servers import VLLM, Server, serve

SERVE = [*VLLM, str(smollm2())]
MODULE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2())]
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]


def chat(server: Server, stream: bool) -> str:
    """Ask for a chat completion; return its text."""
    request = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Which city is the capital of Japan?"}],
        "temperature": 0,
        "max_tokens": 20,
        "stream": stream,
    }
    body = server.post("/v1/chat/completions", request)
    if not stream:
        answer: Any = json.loads(body)["choices"][0]["message"]["content"]
        return str(answer)
    events = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("command", [SERVE, MODULE], ids=["vllm serve", "module"])
def test_chat_completion(command: list[str], tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    options = ["--kv-cache-dtype", "kvq-int4", "--served-model-name", "smollm2"]
    with serve([*command, *OPTIONS, *options], log) as server:
        answers = [chat(server, stream) for stream in (False, True)]
    assert "Tokyo" in answers[0]
    assert answers[1] == answers[0]
    assert "kvq-int4" in log.read_text()


@pytest.mark.parametrize(
    ("victim", "cache_dtypes"),
    [("VLLM::EngineCore", ["auto", "kvq-int4"]), ("VLLM::Worker", ["kvq-int4"])],
    ids=["engine", "worker"],
)
def test_a_killed_process_ends_the_server_as_with_auto(
    victim: str, cache_dtypes: list[str], tmp_path: Path
) -> None:
    model = models.tiny_llama_to_serve(tmp_path / "model")
    endings = {}
    for cache_dtype in cache_dtypes:
        log = tmp_path / f"{cache_dtype}.log"
        options = ["--kv-cache-dtype", cache_dtype]
        with serve([*VLLM, str(model), *OPTIONS, *options], log) as server:
            status = _killed_while_answering(server, str(model), victim)
            endings[cache_dtype] = (status, server.process.wait(60))
        assert "EngineDeadError" in log.read_text()
    status, _ = endings["kvq-int4"]
    assert status == 500
    assert len(set(endings.values())) == 1, endings


def _killed_while_answering(server: Server, model: str, victim: str) -> int:
    """Kill a process of the server's with SIGKILL; return the status of the request it is at."""
    request = {"model": model, "prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, "/v1/completions", request)
        while not server.metric("vllm:num_requests_running"):
            assert not answer.done()
        (process,) = (
            child
            for child in psutil.Process(server.process.pid).children(recursive=True)
            if child.cmdline()[:1] and child.cmdline()[0].startswith(victim)
        )
        process.kill()
        error = answer.exception(120)
    assert isinstance(error, urllib.error.HTTPError), error
    return error.code


def test_an_unknown_dtype_is_refused_with_the_names_that_exist() -> None:
    result = subprocess.run(
        [*SERVE, "--kv-cache-dtype", "kvq-int3"], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "kvq-int3" in result.stderr
    assert "kvq-int4" in result.stderr
    assert "--kv-cache-dtype" in result.stderr or "kv_cache_dtype" in result.stderr


def test_a_refusal_is_the_last_line_that_vllm_prints() -> None:
    result = subprocess.run(
        [*SERVE, "--kv-cache-dtype", "kvq-int4", "--block-size", "48"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "--block-size 48 is no multiple of the kvq unit size 128: use a multiple of" in last
