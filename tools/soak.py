#!/usr/bin/env python3
"""Load a server with a quantised cache for minutes, then look for what it left behind.

    make soak MINUTES=5

`vllm serve` gets a pool of blocks so small that requests are preempted all the time. vLLM's own
benchmark client sends it requests of random lengths, and a client of ours as many more, half of
which it leaves: before the first token, in the middle of the stream, or by closing the connection.
Before the load, prompts of every length up to the largest step: for each number of tokens that it
meets, vLLM keeps the compiled matrix products, which for minutes looks like a leak. After it

- no block is in use, no request runs or waits,
- memory has not grown since the warm-up, by more than a stated slope,
- sampled answers equal those that the idle server gives, but for ties,
- requests were preempted, none failed, and no process logged an error.

It prints what it found as JSON and ends with 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from support import models
from support.servers import VLLM, Server, serve

UNIT_SIZE = 64
MAX_MODEL_LEN = 1024
MAX_SEQS = 24
MAX_STEP_TOKENS = 128
"""So few that oneDNN keeps the matrix products of every step: four or five for each number of
tokens, 1024 in all."""
BLOCKS_WITH_RINGS, BLOCKS_WITHOUT = 100, 24
"""Enough for one request of full length, and for about a third of `MAX_SEQS`."""
WARM_UP = 0.4
"""Share of the time after which memory must be flat: the API server's grows that long."""
MIB_PER_MINUTE = 4.0
"""Slope of the resident memory of all server processes that counts as flat."""
HEAP_MIB_PER_MINUTE = 1.5
"""The same of what the worker has allocated, where a small leak shows at once. Resident memory does
not grow while it fills the 80 MiB of freed memory that malloc keeps for reuse."""
TIE = 0.005
"""Log probabilities closer than this may change places: another batch sums in another order."""
SAMPLES = 40
CONCURRENCY, BENCH_CONCURRENCY = 16, 12
"""Requests in flight, of our client and of vLLM's."""


@dataclass(frozen=True)
class Answer:
    """A greedy continuation: tokens, and the two best log probabilities at each."""

    prompt: list[int]
    tokens: list[int]
    best: list[list[float]]


@dataclass
class Client:
    """Our own load.

    Attributes:
        url: of the server.
        counts: requests by how they ended.
        samples: some of the answers.

    """

    url: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[Answer] = field(default_factory=list)

    async def run(self, until: float) -> None:
        """Send requests, `CONCURRENCY` at a time, until the clock says so."""
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            workers = (self._work(session, i, until) for i in range(CONCURRENCY))
            await asyncio.gather(*workers)

    async def _work(self, session: aiohttp.ClientSession, index: int, until: float) -> None:
        rng = random.Random(f"{self.seed}-{index}")
        while time.monotonic() < until:
            length = rng.choice((rng.randrange(1, 40), rng.randrange(40, 300)))
            prompt = [rng.randrange(1000, 40000) for _ in range(length)]
            max_tokens = rng.randrange(1, 160)
            leave = rng.choice(("finished", "finished", "cancelled", "hung up"))
            try:
                await self._one(session, prompt, max_tokens, leave, rng)
                self.counts[leave] += 1
            except (aiohttp.ClientError, TimeoutError, AssertionError) as error:
                self.counts[f"failed: {type(error).__name__}: {error}"[:200]] += 1

    async def _one(
        self,
        session: aiohttp.ClientSession,
        prompt: list[int],
        max_tokens: int,
        leave: str,
        rng: random.Random,
    ) -> None:
        if leave == "hung up":
            post = asyncio.create_task(self._stream(session, prompt, max_tokens, None))
            await asyncio.sleep(rng.uniform(0, 0.3))
            post.cancel()
            with suppress(asyncio.CancelledError):
                await post
            return
        stop_after = rng.randrange(1, max_tokens + 1) if leave == "cancelled" else None
        answer = await self._stream(session, prompt, max_tokens, stop_after)
        if leave == "finished":
            assert len(answer.tokens) == max_tokens, "an answer is too short"
            # Any answer is as likely to be kept, however many there are.
            seen = self.counts["finished"]
            if len(self.samples) < SAMPLES:
                self.samples.append(answer)
            elif (place := rng.randrange(seen + 1)) < SAMPLES:
                self.samples[place] = answer

    async def _stream(
        self,
        session: aiohttp.ClientSession,
        prompt: list[int],
        max_tokens: int,
        stop_after: int | None,
    ) -> Answer:
        """Ask for a completion; leave in the middle of it after `stop_after` chunks."""
        request = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # two tokens may have the same text
            "stream": True,
        }
        answer = Answer(prompt, [], [])
        async with session.post(f"{self.url}/v1/completions", json=request) as response:
            response.raise_for_status()
            chunks = 0
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    answer.tokens.extend(choice.get("token_ids") or ())
                    top = (choice.get("logprobs") or {}).get("top_logprobs", ())
                    answer.best.extend(sorted(t.values(), reverse=True)[:2] for t in top)
                chunks += 1
                if stop_after is not None and chunks >= stop_after:
                    response.close()
                    break
        return answer

    async def alone(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """Ask for the same again, one at a time; return how many ended in a tie, or differ."""
        ties = different = 0
        async with aiohttp.ClientSession() as session:
            for answer in answers:
                solo = await self._stream(session, answer.prompt, len(answer.tokens), None)
                if solo.tokens == answer.tokens:
                    continue
                pairs = zip(solo.tokens, answer.tokens, strict=True)
                first = next(i for i, (a, b) in enumerate(pairs) if a != b)
                best, second = solo.best[first]
                if best - second < TIE:
                    ties += 1
                else:
                    different += 1
        return ties, different


@dataclass
class Memory(threading.Thread):
    """Notes, once a second, the memory of a server's processes, and what its worker allocated.

    Attributes:
        server: under load.
        times: of the notes, in seconds.
        resident: MiB by the name of the process.
        heap: MiB.

    """

    server: Server
    times: list[float] = field(default_factory=list)
    resident: list[Counter[str]] = field(default_factory=list)
    heap: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self._stop_now = threading.Event()

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        while not self._stop_now.wait(1):
            answer = json.loads(self.server.post("/collective_rpc", {"method": "heap_bytes"}))
            root = psutil.Process(self.server.process.pid)
            resident: Counter[str] = Counter()
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    resident[process.name()] += process.memory_info().rss / 2**20
            self.times.append(time.monotonic())
            self.resident.append(resident)
            self.heap.append(answer["results"][0]["bytes"] / 2**20)

    def finish(self) -> dict[str, Any]:
        """Stop; return the slopes of the lines through what was noted after the warm-up."""
        self._stop_now.set()
        self.join()
        start = int(WARM_UP * len(self.times))
        resident = self.resident[start:]
        minutes = np.array(self.times[start:]) / 60

        def slope(mib: list[float]) -> float:
            return round(float(np.polyfit(minutes, mib, 1)[0]), 2)

        return {
            "resident_mib_after_warm_up": round(resident[0].total()),
            "resident_mib_at_the_end": round(resident[-1].total()),
            "mib_per_minute": slope([note.total() for note in resident]),
            "mib_per_minute_of": {n: slope([note[n] for note in resident]) for n in resident[-1]},
            "heap_mib_at_the_end": round(self.heap[-1]),
            "heap_mib_per_minute": slope(self.heap[start:]),
        }


def compile_every_step(server: Server) -> None:
    """Have the idle server run a step of each number of tokens once."""
    rng = random.Random(2)
    for length in range(1, MAX_STEP_TOKENS + 1):
        prompt = [rng.randrange(1000, 40000) for _ in range(length)]
        server.post("/v1/completions", {"model": "soak", "prompt": prompt, "max_tokens": 1})


def bench(server: Server, tokenizer: Path, until: float) -> Counter[str]:
    """Run ``vllm bench serve`` again and again until the clock says so."""
    total: Counter[str] = Counter()
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "backend": "openai",
                "base-url": server.url,
                "endpoint": "/v1/completions",
                "model": "soak",
                "tokenizer": tokenizer,
                "dataset-name": "random",
                "random-input-len": 200,
                "random-output-len": 60,
                "random-range-ratio": 0.9,
                "num-prompts": 150,
                "max-concurrency": BENCH_CONCURRENCY,
                "seed": total["rounds"],
                "result-dir": folder,
                "result-filename": "result.json",
            }
            command = [VLLM[0], "bench", "serve", "--ignore-eos", "--save-result"]
            command += [word for k, v in options.items() for word in (f"--{k}", str(v))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"vllm bench serve failed: {done.stderr[-2000:]}")
            result = json.loads((Path(folder) / "result.json").read_text())
        total.update(rounds=1, completed=result["completed"], failed=result["failed"])
    return total


def wait_until_idle(server: Server) -> dict[str, float]:
    """Return what the server says it still has, once nothing changes any more."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(60):
        state = {name: server.metric(f"vllm:{name}") for name in names}
        if not any(state.values()):
            break
        time.sleep(1)
    return state


def soak(model: Path, cache_dtype: str, minutes: float, folder: Path) -> dict[str, Any]:
    """Run it all; return what was found."""
    command = [*VLLM, str(model), "--served-model-name", "soak", "--kv-cache-dtype", cache_dtype]
    command += ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    command += ["--max-num-seqs", str(MAX_SEQS)]
    command += ["--max-num-batched-tokens", str(MAX_STEP_TOKENS)]
    has_rings = cache_dtype.startswith("kvq-") and "fp8" not in cache_dtype
    blocks = BLOCKS_WITH_RINGS if has_rings else BLOCKS_WITHOUT
    command += ["--num-gpu-blocks-override", str(blocks)]
    if has_rings:
        command += ["--additional-config", json.dumps({"kvq": {"unit_size": UNIT_SIZE}})]
    log = folder / "server.log"
    command += ["--worker-extension-cls", "support.heap.Heap"]
    with serve(command, log, {"VLLM_SERVER_DEV_MODE": "1"}) as server:  # for /collective_rpc
        compile_every_step(server)
        memory = Memory(server)
        memory.start()
        until = time.monotonic() + 60 * minutes
        client = Client(server.url, seed=1)
        load = threading.Thread(target=lambda: asyncio.run(client.run(until)))
        load.start()
        benched = bench(server, model, until)
        load.join()
        remembered = memory.finish()
        left = wait_until_idle(server)
        ties, different = asyncio.run(client.alone(client.samples))
        preemptions = server.metric("vllm:num_preemptions_total")
        # Not after the end: vLLM, stopped, may still log that its engine has died.
        errors = [line for line in log.read_text().splitlines() if " ERROR " in line]
    return {
        "cache_dtype": cache_dtype,
        "minutes": minutes,
        "bench_requests": benched["completed"],
        "bench_failed": benched["failed"],
        "own_requests": dict(client.counts),
        "preemptions": int(preemptions),
        "left": left,
        **remembered,
        "samples": len(client.samples),
        "ties": ties,
        "different": different,
        "errors_logged": errors[:5],
    }


def faults(report: dict[str, Any]) -> list[str]:
    """Return what in a report must not be, as sentences."""
    failed = [kind for kind in report["own_requests"] if kind.startswith("failed")]
    checks = {
        "requests of vllm bench serve failed": report["bench_failed"] > 0,
        f"requests failed: {failed}": bool(failed),
        "no request was preempted: the test does not test": report["preemptions"] == 0,
        f"something is still in use: {report['left']}": any(report["left"].values()),
        f"memory grows by more than {MIB_PER_MINUTE} MiB a minute": report["mib_per_minute"]
        > MIB_PER_MINUTE,
        f"what the worker allocated grows by more than {HEAP_MIB_PER_MINUTE} MiB a minute": report[
            "heap_mib_per_minute"
        ]
        > HEAP_MIB_PER_MINUTE,
        "answers under load differ from those of the idle server": report["different"] > 0,
        "more than a tenth of the answers ended in a tie": 10 * report["ties"] > report["samples"],
        "an error was logged": bool(report["errors_logged"]),
    }
    return [sentence for sentence, holds in checks.items() if holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--kv-cache-dtype", default="kvq-int4")
    parser.add_argument("--model", type=Path, help="folder; default: a tiny random Llama")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or models.tiny_llama_to_serve(folder / "model")
        report = soak(model, options.kv_cache_dtype, options.minutes, folder)
        print(json.dumps(report, indent=1))
        found = faults(report)
        for sentence in found:
            print(f"soak: {sentence}.", file=sys.stderr)
        if report["errors_logged"]:
            print((folder / "server.log").read_text()[-5000:], file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
