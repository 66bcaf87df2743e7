"""``kvq bench`` without servers: what is asked, and what is made of the answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvq_vllm import benchmarking
from kvq_vllm.benchmarking import Capacity, Round, Workload
from kvq_vllm.cli.bench import _named
from kvq_vllm.errors import KVQError

ANSWERS = {
    "/v1/models": '{"data": [{"id": "m", "root": "/models/m", "max_model_len": 4096}]}',
    "/metrics": "# HELP\n"
    'vllm:cache_config_info{cache_dtype="kvq-int4",kv_cache_max_concurrency="7.5",'
    'kv_cache_size_tokens="30720",engine="0"} 1.0\n',
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = ANSWERS.get(self.path)
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, *unused: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_says_what_it_is(url: str) -> None:
    server = benchmarking._describe(url, None)
    assert (server.model, server.tokenizer) == ("m", "/models/m")
    assert server.capacity == Capacity("kvq-int4", 30720, 7.5, 4096)
    assert benchmarking._describe(url, "/elsewhere").tokenizer == "/elsewhere"


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(KVQError, match=r"does not answer as a vLLM server.*--base-url"):
        benchmarking._describe("http://127.0.0.1:9", None)


def test_rounds_take_turns_and_ratios_stay_within_a_round(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    speeds = {"a": iter([100.0, 50.0, 10.0]), "b": iter([200.0, 50.0, 30.0])}

    def bench(server: benchmarking.Server, workload: Workload) -> Round:
        return Round(next(speeds[order[-1]]), 1, 1, 1, 1)

    monkeypatch.setattr(benchmarking, "_bench", bench)
    results = benchmarking.bench_servers(
        {"a": url, "b": url}, Workload(), rounds=3, report=lambda name, what: order.append(name)
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [r.throughput_ratio for r in results] == [1, 2]
    assert results[1].throughput_range == (1, 3)
    assert results[1].median("output_tokens_per_second") == 50


def test_names_of_servers() -> None:
    assert _named(["old=http://a", "http://b/?x=1"]) == {"old": "http://a", "http://b/?x=1": "http://b/?x=1"}  # fmt: skip # noqa: E501
    with pytest.raises(KVQError, match="must be a URL"):
        _named(["localhost:8000"])


def test_the_last_word_of_a_log() -> None:
    log = (
        "INFO start\nKVQConfigError: --block-size 48 is no multiple.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert benchmarking._last_error(log) == "--block-size 48 is no multiple."
    assert benchmarking._last_error("killed\n") == "killed"
