"""One model on two workers or two engines: the same tokens as the dense reference."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import engines, models
from support.dense import DenseModel
from support.servers import VLLM, Server, serve

from kvq_kernels import Format

NEW_TOKENS = 40
LENGTHS = [10, 63, 64, 65, 128, 200, 256, 300]
KVQ = {"kvq": {"unit_size": 64}}


def prompts(vocabulary: int = models.TINY_VOCABULARY) -> list[list[int]]:
    rng = random.Random(3)
    text = [rng.randrange(3, vocabulary) for _ in range(1000)]
    return [text[80 * i : 80 * i + n] for i, n in enumerate(LENGTHS)]


def mismatches(model: Path, inputs: list[list[int]], tokens: list[list[int]]) -> tuple[int, int]:
    """Choices that a dense model would not make: quantised, and unquantised."""
    formats = (Format.create("kvq-int4", 64, 64), None)
    quantised, unquantised = (
        DenseModel(model, fmt).judge(inputs, tokens).mismatches for fmt in formats
    )
    return quantised, unquantised


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return models.tiny_llama(tmp_path / "llama", num_hidden_layers=4)


@pytest.mark.parametrize("caching", [False, True], ids=["no caching", "prefix caching"])
def test_pipeline_parallel(llama: Path, caching: bool, two_workers: None) -> None:
    """Compiled, because vLLM's CPU backend runs no pipeline eagerly, with any cache."""
    with engines.engine(
        llama,
        kv_cache_dtype="kvq-int4",
        skip_tokenizer_init=True,
        pipeline_parallel_size=2,
        enforce_eager=False,
        enable_prefix_caching=caching,
        additional_config=KVQ,
    ) as llm:
        for _ in range(1 + caching):
            tokens = engines.generate(llm, prompts(), NEW_TOKENS)
            quantised, unquantised = mismatches(llama, prompts(), tokens)
            # The compiled model's sums are in another order, which may tip a few choices.
            assert quantised <= 3
            assert unquantised > 20, (quantised, unquantised)
        if caching:
            assert engines.metric(llm, "vllm:prefix_cache_hits") > 0
        free, total = engines.free_blocks(llm)
        assert free == total


def test_data_parallel(tmp_path: Path, two_workers: None) -> None:
    """A server with two engines, each with a cache of its own; both get requests."""
    model = models.tiny_llama_to_serve(tmp_path / "model")
    options = ["--data-parallel-size", "2", "--kv-cache-dtype", "kvq-int4", "--dtype", "float32"]
    options += ["--enforce-eager", "--max-model-len", "1024"]
    options += ["--additional-config", json.dumps(KVQ)]
    inputs = prompts(vocabulary=40000)
    with serve([*VLLM, str(model), *options], tmp_path / "server.log") as server:
        with ThreadPoolExecutor(len(inputs)) as pool:
            tokens = list(pool.map(lambda p: complete(server, str(model), p), inputs))
        answered = [
            server.metric("vllm:request_success_total", f'engine="{engine}"') for engine in (0, 1)
        ]
    assert min(answered) > 0
    assert sum(answered) == len(inputs)
    quantised, unquantised = mismatches(model, inputs, tokens)
    assert quantised == 0
    assert unquantised > 0


def complete(server: Server, model: str, prompt: list[int]) -> list[int]:
    """Ask a server for a greedy continuation; return its tokens."""
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer: Any = json.loads(server.post("/v1/completions", request))
    return list(answer["choices"][0]["token_ids"])
