"""Every kind of model with every format: the same tokens as the dense reference.

``make support-matrix`` writes docs/models.md from the results.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support import engines, models
from support.dense import DenseModel
from support.fp8 import Fp8Layer, at_scale_one
from support.model_matrix import FORMATS, SERVED, ModelKind

from kvq_kernels import Format
from kvq_kernels.fp8 import Fp8Format, is_fp8

UNIT_SIZE = 64
LENGTHS = [10, 63, 64, 65, 129, 200]
NEW_TOKENS = 30


OTHER_CACHES = [x for x in SERVED if "share caches" in x.special or "beside" in x.special]
"""Models whose layers share caches, or have states instead."""


@cache
def text() -> list[int]:
    rng = random.Random(1)
    # The last few tokens of the vocabulary stand for images.
    return [rng.randrange(3, models.TINY_VOCABULARY - 8) for _ in range(600)]


def prompts() -> list[list[int]]:
    return [text()[:n] if n % 2 else text()[300 : 300 + n] for n in LENGTHS]


def options_of(name: str) -> dict[str, Any]:
    """Engine options: small units, so that short prompts fill some."""
    options: dict[str, Any] = {"kv_cache_dtype": name, "skip_tokenizer_init": True}
    if not is_fp8(name):
        options["additional_config"] = {"kvq": {"unit_size": UNIT_SIZE}}
    return options


def reference(folder: Path, model: ModelKind, name: str) -> DenseModel:
    if is_fp8(name):
        return DenseModel(folder, at_scale_one(name, model.head_size))
    return DenseModel(folder, Format.create(name, model.head_size, UNIT_SIZE))


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.name)
@pytest.mark.parametrize("name", FORMATS)
def test_model_equals_the_dense_reference(
    name: str, model: ModelKind, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("model", model.name)
    record_property("format", name)
    folder = model.make(tmp_path, initializer_range=models.CALM)
    chunked = {"max_num_batched_tokens": 97, "max_num_seqs": 16}
    with engines.engine(folder, **options_of(name), **chunked, **model.options) as llm:
        tokens, logprobs = engines.generate_with_logprobs(llm, prompts(), NEW_TOKENS)
    quantised = reference(folder, model, name).judge(prompts(), tokens)
    # Sums in another order round a key to another code now and then. In models as small as these,
    # above all where that changes an expert, it may tip one choice.
    assert quantised.mismatches <= 1
    # The check can tell: the unquantised model is much further away.
    unquantised = DenseModel(folder, None).judge(prompts(), tokens)
    ours = distance(logprobs, quantised.logprobs)
    assert 10 * ours < distance(logprobs, unquantised.logprobs)


def distance(logprobs: list[list[float]], others: list[list[float]]) -> float:
    """The mean difference of log probabilities."""
    ours, theirs = (torch.tensor([*chain.from_iterable(x)]) for x in (logprobs, others))
    return (ours - theirs).abs().mean().item()


@pytest.mark.parametrize("model", OTHER_CACHES, ids=lambda model: model.name)
@pytest.mark.parametrize("name", ["kvq-int4", "kvq-fp8"])
def test_other_caches_whatever_the_engine_does(
    name: str, model: ModelKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory is poisoned, and the second time prompts are cached, or blocks used again.

    At last prompts of several chunks are scored: every layer must find the ring as it was before
    the chunk, which the last token's choice alone does not show.
    """
    # With Mamba 2 layers, vLLM's CPU build fails as soon as prefixes are cached, with `auto` too.
    cached = "beside" not in model.special
    engines.poison_cache(monkeypatch)
    folder = model.make(tmp_path, initializer_range=models.CALM)
    with engines.engine(
        folder,
        **options_of(name),
        **model.options,
        enable_prefix_caching=cached,
        max_num_batched_tokens=97,
        max_num_seqs=16,
    ) as llm:
        dense = reference(folder, model, name)
        for _ in range(2):
            tokens = engines.generate(llm, prompts(), NEW_TOKENS)
            assert dense.judge(prompts(), tokens).mismatches == 0
        assert (engines.metric(llm, "vllm:prefix_cache_hits") > 0) == cached
        long = [text()[:300], text()[300:]]
        scores = engines.prompt_logprobs(llm, long)
        free, total = engines.free_blocks(llm)
        assert free == total
    ours = distance(scores, dense.prompt_logprobs(long))
    unquantised = DenseModel(folder, None).prompt_logprobs(long)
    assert 20 * ours < distance(scores, unquantised)


@pytest.mark.parametrize("model", OTHER_CACHES, ids=lambda model: model.name)
def test_preempted(model: ModelKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests fit up to 128 tokens each, and not when they grow beyond."""
    blocks_of_a_request = {"Gemma 3n": 50, "Gemma 4 E2B, E4B": 30, "Granite 4": 8}[model.name]
    inputs = [text()[50 * i : 50 * i + n] for i, n in enumerate([110, 115, 120, 124, 127])]
    engines.poison_cache(monkeypatch)
    folder = model.make(tmp_path, initializer_range=models.CALM)
    with engines.engine(
        folder,
        **options_of("kvq-int4"),
        **model.options,
        block_size=UNIT_SIZE,
        max_model_len=256,
        num_gpu_blocks_override=len(inputs) * blocks_of_a_request + 2,
    ) as llm:
        alone = [engines.generate(llm, [prompt], NEW_TOKENS)[0] for prompt in inputs]
        assert engines.metric(llm, "vllm:num_preemptions") == 0
        assert engines.generate(llm, inputs, NEW_TOKENS) == alone
        assert engines.metric(llm, "vllm:num_preemptions") > 0
        free, total = engines.free_blocks(llm)
        assert free == total
    assert reference(folder, model, "kvq-int4").judge(inputs, alone).mismatches == 0


def test_measured_scales_of_layers_that_share_caches(tmp_path: Path) -> None:
    """Only the layers that own a cache have scales; the others read with the owner's."""
    folder = models.tiny_gemma4_sharing(tmp_path / "model", initializer_range=models.CALM)
    file = tmp_path / "scales.json"
    kvq = {"scales": "warmup", "scales_out": str(file)}
    with engines.engine(
        folder, kv_cache_dtype="kvq-fp8", skip_tokenizer_init=True, additional_config={"kvq": kvq}
    ) as llm:
        tokens = engines.generate(llm, prompts(), NEW_TOKENS)
    written = json.loads(file.read_text())["layers"]
    assert list(written) == [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    fmt = Fp8Format("kvq-fp8", 64)
    layers = [
        Fp8Layer(fmt, torch.tensor(scales["k_scale"]), torch.tensor(scales["v_scale"]))
        for scales in written.values()
    ]
    owners = [0, 1, 2, 1, 1, 2]
    dense = DenseModel(folder, lambda module: layers[owners[module.layer_idx]])
    assert dense.judge(prompts(), tokens).mismatches == 0
