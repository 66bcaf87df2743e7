"""``kvq bench``: speed and capacity of cache dtypes."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvq_vllm.cli.output import print_json
from kvq_vllm.errors import KVQError

if TYPE_CHECKING:
    from kvq_vllm.benchmarking import BenchResult

EXAMPLES = """
Examples:

  kvq bench MODEL                                   auto against every kvq format

  kvq bench MODEL --formats auto,kvq-int4 --input-tokens 8000 --concurrency 32

  kvq bench MODEL --server-args "--dtype float32 --tensor-parallel-size 2"

  kvq bench --base-url http://localhost:8000        a server that runs already

  kvq bench --base-url old=http://a:8000 --base-url new=http://b:8000 --json
"""


def bench_command(
    model: Annotated[
        Path | None, typer.Argument(help="Folder of the model; not with --base-url.")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="Cache dtypes, with commas between; default: auto and kvq.")
    ] = None,
    base_url: Annotated[
        list[str] | None, typer.Option(help="A running server, [NAME=]URL; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder of the running server's tokenizer.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per round.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 1024,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    server_args: Annotated[str, typer.Option(help="More arguments for vllm serve.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Compare speed and capacity of cache dtypes with vLLM's own benchmark.

    Starts a server for each cache dtype in turn and runs vLLM's `bench serve` against it, or
    measures servers that run already. Shows throughput, time to first token (TTFT), time per
    output token (TPOT) and how many requests the engine says it can hold at once.
    """
    from rich.console import Console

    from kvq_kernels.formats import SCHEMES
    from kvq_vllm.benchmarking import Workload, bench_formats, bench_servers

    if (model is None) == (base_url is None):
        raise KVQError("Give either a model or --base-url.")
    workload = Workload(requests, concurrency, input_tokens, output_tokens)
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:

        def report(name: str, what: str) -> None:
            if console.is_terminal:
                status.update(f"{name}: {what}")
            else:
                console.print(f"{name}: {what}")

        if model is not None:
            names = formats.split(",") if formats else ["auto", *SCHEMES]
            words = shlex.split(server_args)
            results = bench_formats(model, names, workload, rounds, words, report)
        else:
            results = bench_servers(_named(base_url or []), workload, rounds, tokenizer, report)
    if as_json:
        print_json({"workload": asdict(workload), "results": [asdict(r) for r in results]})
    else:
        _print(results)


def _named(servers: list[str]) -> dict[str, str]:
    """Split ``NAME=URL``; without a name, the URL is its own."""
    named = {}
    for server in servers:
        name, equals, url = server.partition("=")
        if not equals or "://" in name:
            name, url = server, server
        if not url.startswith(("http://", "https://")):
            raise KVQError(f"--base-url {server} must be a URL such as http://localhost:8000.")
        named[name] = url
    return named


def _print(results: list[BenchResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="medians over rounds, with the lowest and highest ratio")
    for heading in ("", "output tokens/s", f"against {results[0].name}", "TTFT ms", "TPOT ms"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("cache tokens", justify="right")
    table.add_column("requests at once", justify="right")
    for r in results:
        low, high = r.throughput_range
        capacity = r.capacity
        table.add_row(
            r.name,
            f"{r.median('output_tokens_per_second'):.1f}",
            f"{r.throughput_ratio:.2f}x\n({low:.2f} to {high:.2f})",
            f"{r.median('ttft_ms'):.0f}",
            f"{r.median('tpot_ms'):.1f}",
            "unknown" if capacity.tokens is None else f"{capacity.tokens:,}",
            "unknown"
            if capacity.max_concurrency is None
            else f"{capacity.max_concurrency:.1f} of {capacity.max_model_len:,} tokens",
        )
    Console().print(table)
