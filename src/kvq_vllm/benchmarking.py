"""Speed and capacity of cache dtypes, by vLLM's own serving benchmark.

For every cache dtype a server is started, ``vllm bench serve`` sends it requests, and the server
stops; then the next. Rounds are interleaved, in an order that turns around, so that what else
happens on the machine hits all alike, and ratios are taken within a round. Servers that already
run can be compared instead.
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_vllm.errors import KVQError
from kvq_vllm.evaluation.runner import (
    check_formats,
    check_model,
    engine_environment,
    require_vllm,
)

# vLLM's `bench serve` without its command line, which needs a distribution called `vllm`.
_CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_SERVER = "vllm.entrypoints.openai.api_server"
START_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Workload:
    """What the server is asked.

    Attributes:
        requests: per round.
        concurrency: requests in flight.
        input_tokens: per request, random.
        output_tokens: per request, exactly.

    """

    requests: int = 32
    concurrency: int = 8
    input_tokens: int = 1024
    output_tokens: int = 128


@dataclass(frozen=True)
class Round:
    """What ``vllm bench serve`` reported once.

    Attributes:
        output_tokens_per_second: of all requests together.
        ttft_ms: median time to first token.
        ttft_p99_ms: its 99th percentile.
        tpot_ms: median time per output token after the first.
        tpot_p99_ms: its 99th percentile.

    """

    output_tokens_per_second: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float


@dataclass(frozen=True)
class Capacity:
    """What the engine says of its cache.

    Attributes:
        cache_dtype: value of ``--kv-cache-dtype``.
        tokens: that fit in the cache.
        max_concurrency: requests of `max_model_len` tokens that fit at once.
        max_model_len: longest request.

    """

    cache_dtype: str
    tokens: int | None
    max_concurrency: float | None
    max_model_len: int | None


@dataclass(frozen=True)
class BenchResult:
    """One row: a cache dtype, or a running server.

    Attributes:
        name: as the user gave it.
        capacity: of the engine.
        rounds: in order.
        throughput_ratio: median of the ratios to the first row in the same round; above 1 is
            faster.
        throughput_range: smallest and largest of these ratios.

    """

    name: str
    capacity: Capacity
    rounds: list[Round]
    throughput_ratio: float
    throughput_range: tuple[float, float]

    def median(self, field: str) -> float:
        """Return the median of a field of :class:`Round`."""
        return statistics.median(getattr(r, field) for r in self.rounds)


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: without a trailing slash.
        model: the name it serves.
        tokenizer: folder or name of the model, for its tokenizer.
        capacity: of its cache.

    """

    url: str
    model: str
    tokenizer: str
    capacity: Capacity


Report = Callable[[str, str], None]
"""Called with the name of a row and what is being done."""


def bench_formats(
    model: Path,
    formats: Sequence[str],
    workload: Workload,
    rounds: int = 3,
    server_arguments: Sequence[str] = (),
    report: Report = lambda name, what: None,
) -> list[BenchResult]:
    """Start a server for each format in turn, and measure it.

    Args:
        model: folder of the model.
        formats: values of ``--kv-cache-dtype``; ratios are to the first.
        workload: what is asked.
        rounds: how often.
        server_arguments: for ``vllm serve``.
        report: called as the work goes on.

    Raises:
        KVQError: a server does not start, or the benchmark fails.

    """
    check_model(model)
    check_formats(formats)
    require_vllm()
    capacities: dict[str, Capacity] = {}

    def measure(name: str) -> Round:
        report(name, "starting")
        with _local_server(model, name, workload, server_arguments) as server:
            report(name, "measuring")
            capacities[name] = server.capacity
            return _bench(server, workload)

    measured = _interleave(formats, rounds, measure)
    return _results(measured, capacities)


def bench_servers(
    urls: Mapping[str, str],
    workload: Workload,
    rounds: int = 3,
    tokenizer: str | None = None,
    report: Report = lambda name, what: None,
) -> list[BenchResult]:
    """Measure servers that already run, in turns.

    Args:
        urls: base URL by the name that is shown; ratios are to the first.
        workload: what is asked.
        rounds: how often.
        tokenizer: folder of the tokenizer; None where the server's model path is right here too.
        report: called as the work goes on.

    Raises:
        KVQError: a server does not answer, or the benchmark fails.

    """
    servers = {name: _describe(url.rstrip("/"), tokenizer) for name, url in urls.items()}

    def measure(name: str) -> Round:
        report(name, "measuring")
        return _bench(servers[name], workload)

    measured = _interleave(list(urls), rounds, measure)
    return _results(measured, {name: server.capacity for name, server in servers.items()})


def _interleave(
    names: Sequence[str], rounds: int, measure: Callable[[str], Round]
) -> dict[str, list[Round]]:
    measured: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds):
        for name in list(names) if number % 2 == 0 else list(names)[::-1]:
            measured[name].append(measure(name))
    return measured


def _results(
    measured: Mapping[str, list[Round]], capacities: Mapping[str, Capacity]
) -> list[BenchResult]:
    first = next(iter(measured.values()))
    results = []
    for name, rounds in measured.items():
        ratios = [
            r.output_tokens_per_second / f.output_tokens_per_second
            for r, f in zip(rounds, first, strict=True)
        ]
        spread = (min(ratios), max(ratios))
        results.append(
            BenchResult(name, capacities[name], rounds, statistics.median(ratios), spread)
        )
    return results


# --- servers -----------------------------------------------------------------------------------


@contextmanager
def _local_server(
    model: Path, cache_dtype: str, workload: Workload, arguments: Sequence[str]
) -> Iterator[Server]:
    """Run ``vllm serve`` on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    longest = workload.input_tokens + workload.output_tokens + 64
    command = [sys.executable, "-m", _SERVER, "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--kv-cache-dtype", cache_dtype]
    if "--max-model-len" not in " ".join(arguments):
        command += ["--max-model-len", str(longest)]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        environment = engine_environment()
        process = subprocess.Popen(
            [*command, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, cache_dtype, Path(log.name))
            yield _describe(url, str(model))
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[Any], name: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise KVQError(f"The server for {name} did not start: {_last_error(log.read_text())}")
        try:
            _get(f"{url}/health")
            return
        except OSError:
            time.sleep(0.5)
    raise KVQError(f"The server for {name} did not start within {START_TIMEOUT:.0f} s.")


def _last_error(log: str) -> str:
    """Return the message of the last exception in a log."""
    errors = re.findall(r"(?:^|\s)(?:\w+\.)*\w*(?:Error|Exception): (.+)$", log, re.MULTILINE)
    useful = [e for e in errors if "See root cause above" not in e]
    lines = log.strip().splitlines() or ["it said nothing."]
    return (useful or lines)[-1].strip()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def _describe(url: str, tokenizer: str | None) -> Server:
    """Ask a running server what it serves.

    Raises:
        KVQError: it does not answer as a vLLM server does.

    """
    try:
        model = json.loads(_get(f"{url}/v1/models"))["data"][0]
        metrics = _get(f"{url}/metrics")
    except (OSError, ValueError, LookupError) as error:
        raise KVQError(
            f"{url} does not answer as a vLLM server ({error}): check --base-url."
        ) from None
    info = _cache_info(metrics)
    capacity = Capacity(
        cache_dtype=info.get("cache_dtype", "unknown"),
        tokens=_number(info.get("kv_cache_size_tokens"), int),
        max_concurrency=_number(info.get("kv_cache_max_concurrency"), float),
        max_model_len=model.get("max_model_len"),
    )
    return Server(url, model["id"], tokenizer or model.get("root") or model["id"], capacity)


def _cache_info(metrics: str) -> dict[str, str]:
    """Return the labels of vLLM's ``vllm:cache_config_info``."""
    for line in metrics.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            return dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line))
    return {}


def _number(text: str | None, kind: Callable[[str], Any]) -> Any:
    return None if text in (None, "None") else kind(text)


def _bench(server: Server, workload: Workload) -> Round:
    """Run ``vllm bench serve`` once.

    Raises:
        KVQError: it fails, or not all requests are answered.

    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "backend": "openai",
            "base-url": server.url,
            "endpoint": "/v1/completions",
            "model": server.model,
            "tokenizer": server.tokenizer,
            "dataset-name": "random",
            "random-input-len": workload.input_tokens,
            "random-output-len": workload.output_tokens,
            "num-prompts": workload.requests,
            "max-concurrency": workload.concurrency,
            "num-warmups": min(2, workload.concurrency),
            "percentile-metrics": "ttft,tpot",
            "metric-percentiles": "99",
            "seed": 0,
            "result-dir": folder,
            "result-filename": "result.json",
        }
        command = [sys.executable, "-c", _CLIENT, "--ignore-eos", "--save-result", "--disable-tqdm"]
        command += [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=engine_environment()
        )
        file = Path(folder) / "result.json"
        if done.returncode or not file.exists():
            raise KVQError(f"vllm bench serve failed: {_last_error(done.stderr + done.stdout)}")
        result = json.loads(file.read_text())
    if result["completed"] != workload.requests:
        raise KVQError(
            f"Only {result['completed']} of {workload.requests} requests were answered: look at "
            "the server's log."
        )
    return Round(
        output_tokens_per_second=result["output_throughput"],
        ttft_ms=result["median_ttft_ms"],
        ttft_p99_ms=result["p99_ttft_ms"],
        tpot_ms=result["median_tpot_ms"],
        tpot_p99_ms=result["p99_tpot_ms"],
    )
