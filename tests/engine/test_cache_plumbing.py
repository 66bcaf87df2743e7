"""The cache and what moves or outlives it: resets, new weights, adapters, KV connectors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import checkpoints, engines, models, offloading
from support.dense import DenseModel
from support.fp8 import E5M2, Fp8Layer, at_scale_one
from support.model_matrix import FORMATS
from test_fp8_engines import checkpoint

from kvq_kernels import Format
from kvq_kernels.formats import ring_block_size
from kvq_kernels.fp8 import is_fp8

NEW_TOKENS = 16
PAGE = 64
LENGTHS = [40, 64, 65, 128, 200, 256]
"""Prompts of whole pages too: a hit must leave their last token to compute."""
BLOCKS = 200


def prompts(seed: int = 1) -> list[list[int]]:
    """Prompts without common prefixes."""
    rng = random.Random(seed)
    return [[rng.randrange(3, models.TINY_VOCABULARY) for _ in range(n)] for n in LENGTHS]


HITS = sum((n - 1) // PAGE * PAGE for n in LENGTHS)


def format_of(name: str) -> Format | Fp8Layer:
    return at_scale_one(name, 64) if is_fp8(name) else Format.create(name, 64, PAGE, PAGE)


def start(model: Path, name: str, **options: Any) -> Any:
    """Start an engine with small pages, so that short prompts fill several."""
    defaults = {
        "block_size": PAGE,
        "num_gpu_blocks_override": BLOCKS,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "additional_config": {}
        if is_fp8(name)
        else {"kvq": {"unit_size": PAGE, "key_group_size": PAGE}},
    }
    return engines.engine(model, kv_cache_dtype=name, **(defaults | options))


def assert_of(model: Path, name: str, tokens: list[list[int]], inputs: Any = None) -> None:
    judged = DenseModel(model, format_of(name)).judge(inputs or prompts(), tokens)
    assert judged.mismatches == 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"), initializer_range=models.CALM)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_gemma3(tmp_path_factory.mktemp("gemma3"), initializer_range=models.CALM)


@pytest.mark.parametrize("name", [*FORMATS, E5M2])
def test_prefix_cache_with_resets(llama: Path, name: str) -> None:
    def hits() -> int:
        return engines.metric(llm, "vllm:prefix_cache_hits")

    with start(llama, name) as llm:
        tokens = engines.generate(llm, prompts(), NEW_TOKENS)
        assert_of(llama, name, tokens)
        for others in (None, prompts(2)):
            engines.forget_cache(llm)
            before = hits()
            if others:
                engines.generate(llm, others, NEW_TOKENS)
            assert engines.generate(llm, prompts(), NEW_TOKENS) == tokens
            assert hits() == before
            assert engines.generate(llm, prompts(), NEW_TOKENS) == tokens
            assert hits() == before + HITS
        free, total = engines.free_blocks(llm)
        assert free == total


@pytest.mark.parametrize("name", ["kvq-int4", "kvq-fp8"])
def test_other_weights(llama: Path, name: str, tmp_path: Path) -> None:
    """As a trainer hands them over: new weights, then a reset of what the old ones cached."""
    weights = load_file(llama / "model.safetensors")
    turned = {n: w.flip(0) for n, w in weights.items() if n.endswith(("_proj.weight", "lm_head"))}
    other = checkpoints.edited(llama, tmp_path / "other", turned)
    with start(llama, name) as llm:
        assert_of(llama, name, engines.generate(llm, prompts(), NEW_TOKENS))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.reset_prefix_cache()
        for _ in range(2):  # the second time with prefix hits
            tokens = engines.generate(llm, prompts(), NEW_TOKENS)
            assert_of(other, name, tokens)
    assert DenseModel(llama, format_of(name)).judge(prompts(), tokens).mismatches > 0


# --- LoRA --------------------------------------------------------------------------------------


def adapter(model: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """Write a random LoRA adapter for all projections of attention, and a checkpoint with it.

    Returns:
        the adapter's folder, as PEFT writes it, and the merged checkpoint's.

    """
    rank, alpha = 8, 16
    generator = torch.Generator().manual_seed(seed)
    tensors, merged = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        if "self_attn" not in name:
            continue
        rows, columns = weight.shape
        down, up = (
            0.1 * torch.randn(x, generator=generator) for x in ((rank, columns), (rows, rank))
        )
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        merged[name] = weight + alpha / rank * up @ down
    lora = folder / f"lora{seed}"
    lora.mkdir()
    save_file(tensors, lora / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    (lora / "adapter_config.json").write_text(json.dumps(config))
    return lora, checkpoints.edited(model, folder / f"merged{seed}", merged)


@pytest.mark.parametrize(("name", "tipped"), [("kvq-int4", 0), ("kvq-fp8", 4)])
def test_two_adapters_and_none_in_one_batch(
    llama: Path, name: str, tipped: int, tmp_path: Path
) -> None:
    """The same prompts for all three: a page that another one filled would be the wrong one.

    Merged weights round otherwise than the sum of two products, and fp8 makes much of last bits, so
    a few of 48 choices may tip; another adapter's all differ.
    """
    from vllm.lora.request import LoRARequest

    (first, first_merged), (second, second_merged) = (adapter(llama, tmp_path, i) for i in (1, 2))
    adapters = [None, LoRARequest("first", 1, str(first)), LoRARequest("second", 2, str(second))]
    dense = [DenseModel(model, format_of(name)) for model in (llama, first_merged, second_merged)]
    inputs = [prompt for prompt in prompts()[-3:] for _ in adapters]
    # vLLM's CPU kernels give requests without an adapter the last slot's, so one stays empty.
    slots = len(adapters)
    with start(llama, name, enable_lora=True, max_loras=slots, max_lora_rank=8) as llm:
        for _ in range(2):  # the second time with prefix hits
            before = engines.metric(llm, "vllm:prefix_cache_hits")
            tokens = engines.generate(llm, inputs, NEW_TOKENS, lora_request=adapters * 3)
            for i in range(3):
                own, other = (
                    model.judge(inputs[i::3], tokens[i::3]).mismatches
                    for model in (dense[i], dense[i - 1])
                )
                assert own <= tipped
                assert other > 24
        hits = engines.metric(llm, "vllm:prefix_cache_hits") - before
    assert hits == sum((len(prompt) - 1) // PAGE * PAGE for prompt in inputs)


# --- KV connectors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "llama") for name in FORMATS] + [("kvq-int4", "gemma3"), ("kvq-fp8", "gemma3")],
)
def test_offloading_to_cpu_memory(
    name: str, model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back from memory serves as if it had been computed, and the tail is computed."""
    folder: Path = request.getfixturevalue(model)
    offloading.make_possible(monkeypatch)
    with start(
        folder, name, kv_offloading_size=0.05, max_num_batched_tokens=97, max_num_seqs=16
    ) as llm:
        tokens = engines.generate(llm, prompts(), NEW_TOKENS)
        assert_of(folder, name, tokens)
        worker = offloading.CopyingSpec.last_worker
        assert worker.pages_moved["load"] == 0
        stored = [memory.clone() for memory in worker.memory]
        engines.forget_cache(llm)
        assert engines.generate(llm, prompts(), NEW_TOKENS) == tokens
        hits = engines.metric(llm, "vllm:external_prefix_cache_hits")
        # Without a ring, a prompt of whole pages hits to its end and computes its last token again.
        last_pages = sum(n % PAGE == 0 for n in LENGTHS) if is_fp8(name) and model == "llama" else 0
        assert hits == HITS + last_pages * PAGE
        assert worker.pages_moved["load"] > 0
        for memory, before in zip(worker.memory, stored, strict=True):
            assert torch.equal(memory, before)
        free, total = engines.free_blocks(llm)
        assert free == total


def test_preempted_requests_come_back_from_cpu_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests fit while they have two pages each, and not when they grow to three."""
    offloading.make_possible(monkeypatch)
    inputs = [prompt[:n] for prompt, n in zip(prompts()[3:], (110, 120, 127), strict=True)]
    fmt, kv_heads, bytes_of_fp32 = Format.create("kvq-int4", 64, PAGE, PAGE), 2, 4
    ring_block = ring_block_size(
        PAGE, PAGE * fmt.bytes_per_token * kv_heads, 2 * 64 * bytes_of_fp32 * kv_heads
    )
    with start(
        llama,
        "kvq-int4",
        kv_offloading_size=0.05,
        enable_prefix_caching=False,  # so that only the connector can bring pages back
        num_gpu_blocks_override=3 * (2 + PAGE // ring_block) + 2,
        max_model_len=256,
    ) as llm:
        tokens = engines.generate(llm, inputs, 60)
        assert engines.metric(llm, "vllm:num_preemptions") > 0
        assert offloading.CopyingSpec.last_worker.pages_moved["load"] > 0
    assert_of(llama, "kvq-int4", tokens, inputs)


@pytest.mark.parametrize(("name", "model"), [(E5M2, "scaled llama"), ("kvq-fp8", "gemma3")])
def test_a_prefill_and_a_decode_engine_share_a_folder(
    name: str, model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from vllm.config import KVTransferConfig

    if model == "gemma3":
        folder = request.getfixturevalue("gemma3")
    else:
        folder = checkpoint(request.getfixturevalue("llama"), tmp_path / "model", "attn_head")

    def one_of_the_pair(role: str) -> Any:
        transfer = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role=role,
            kv_connector_extra_config={"shared_storage_path": str(tmp_path / "pages")},
        )
        return start(folder, name, kv_transfer_config=transfer)

    with one_of_the_pair("kv_producer") as llm:
        tokens = engines.generate(llm, prompts(), NEW_TOKENS)
        assert engines.metric(llm, "vllm:external_prefix_cache_hits") == 0
    with one_of_the_pair("kv_consumer") as llm:
        assert engines.generate(llm, prompts(), NEW_TOKENS) == tokens
        hits = engines.metric(llm, "vllm:external_prefix_cache_hits")
    # This connector leaves the last but one token to compute, too.
    assert hits == sum(max(n - 2, 0) // PAGE * PAGE for n in LENGTHS)
