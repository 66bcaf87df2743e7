"""Run vLLM's OpenAI server as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VLLM = [str(Path(sys.executable).parent / "vllm"), "serve"]
STARTUP_SECONDS = 240


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: without a trailing slash.
        process: of the API server; the engine's processes are its children.
        log: what they all print.

    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as response:
            return str(response.read().decode())

    def post(self, path: str, request: Mapping[str, Any]) -> str:
        """Return the answer to a request in JSON; raises ``HTTPError`` for a bad status."""
        post = urllib.request.Request(
            f"{self.url}{path}", json.dumps(request).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(post, timeout=120) as response:
            return str(response.read().decode())

    def metric(self, name: str, label: str = "") -> float:
        """Sum of one of the server's metrics over all labels, or over those with `label`."""
        lines = self.get("/metrics").splitlines()
        lines = [line for line in lines if line.startswith(f"{name}{{") and label in line]
        assert lines, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextmanager
def serve(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a server on a free port of this machine, until it is healthy and then until the end.

    Args:
        command: such as ``[*VLLM, model, "--dtype", "float32"]``.
        log: file for its output.
        environment: variables to set.

    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"} | (environment or {})
    own.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=own,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        deadline = time.monotonic() + STARTUP_SECONDS
        while not _healthy(server):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(server: Server) -> bool:
    try:
        server.get("/health")
    except OSError:
        return False
    return True
