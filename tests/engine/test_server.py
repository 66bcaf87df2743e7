"""The OpenAI server, started both ways, on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.models import smollm2

STARTUP_SECONDS = 240
SERVE = [str(Path(sys.executable).parent / "vllm"), "serve", str(smollm2())]
MODULE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2())]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def server(command: list[str], log: Path) -> Iterator[str]:
    """Run a server; yield its base URL once it is healthy."""
    port = _free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--kv-cache-dtype", "kvq-int4"]
    options += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *options, "--served-model-name", "smollm2"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + STARTUP_SECONDS
        while not _healthy(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def chat(url: str, stream: bool) -> str:
    """Ask for a chat completion; return its text."""
    request = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 20,
        "stream": stream,
    }
    post = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(request).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(post, timeout=120) as response:
        body = response.read().decode()
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
    with server(command, log) as url:
        answers = [chat(url, stream) for stream in (False, True)]
    assert "Paris" in answers[0]
    assert answers[1] == answers[0]
    assert "kvq-int4" in log.read_text()


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
    assert "--block-size 48 is no multiple of the kvq unit size 256: use a multiple of" in last
