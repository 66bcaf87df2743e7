"""Start vLLM engines in the test process, one after the other, and look inside."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Before vLLM is imported: engines in this process, so that tests can look inside.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}


@contextmanager
def engine(model: str | os.PathLike[str], **options: Any) -> Iterator[Any]:
    """Start an ``LLM`` and take it down again.

    Args:
        model: folder of the model.
        options: arguments of ``LLM``, over :data:`DEFAULTS`.

    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(model=str(model), **(DEFAULTS | options))
    try:
        yield llm
    finally:
        core = llm.llm_engine.engine_core
        core.shutdown()
        del core, llm
        cleanup_dist_env_and_memory()
        gc.collect()


def generate(
    llm: Any, prompts: Sequence[list[int]], max_tokens: int, **options: Any
) -> list[list[int]]:
    """Greedy continuations of token prompts, `max_tokens` each; `options` are for ``generate``."""
    return generate_with_logprobs(llm, prompts, max_tokens, **options)[0]


def generate_with_logprobs(
    llm: Any, prompts: Sequence[list[int]], max_tokens: int, **options: Any
) -> tuple[list[list[int]], list[list[float]]]:
    """As :func:`generate`, with the log probability of every token."""
    outputs = _run(llm, prompts, {"max_tokens": max_tokens, "logprobs": 0}, **options)
    completions = [output.outputs[0] for output in outputs]
    tokens = [list(completion.token_ids) for completion in completions]
    return tokens, [_chosen(c.token_ids, c.logprobs) for c in completions]


def prompt_logprobs(llm: Any, prompts: Sequence[list[int]]) -> list[list[float]]:
    """Log probabilities of every prompt's tokens but its first."""
    outputs = _run(llm, prompts, {"max_tokens": 1, "prompt_logprobs": 0})
    return [_chosen(x.prompt_token_ids[1:], x.prompt_logprobs[1:]) for x in outputs]


def _run(
    llm: Any, prompts: Sequence[list[int]], sampling: dict[str, Any], **options: Any
) -> list[Any]:
    from vllm import SamplingParams

    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **sampling),
        use_tqdm=False,
        **options,
    )


def _chosen(tokens: Sequence[int], logprobs: Sequence[dict[int, Any]]) -> list[float]:
    return [step[token].logprob for token, step in zip(tokens, logprobs, strict=True)]


def poison_cache(monkeypatch: Any) -> None:
    """Fill the KV cache of engines started from now on with 0xFF: NaN in every float format."""
    import torch
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import attn_utils

    allocate = gpu_model_runner.allocate_kv_cache

    def allocate_poisoned(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        caches = allocate(*args, **kwargs)
        for storage in {id(s := c.untyped_storage()): s for c in caches.values()}.values():
            storage.fill_(0xFF)
        return caches

    for runner in (gpu_model_runner, attn_utils):  # V1's and V2's
        monkeypatch.setattr(runner, "allocate_kv_cache", allocate_poisoned)


def forget_cache(llm: Any) -> None:
    """Reset the prefix cache of an idle engine in this process and fill the KV cache with 0xFF."""
    assert llm.reset_prefix_cache()
    caches = worker(llm).model_runner.kv_caches
    for storage in {id(s := c.untyped_storage()): s for c in caches}.values():
        storage.fill_(0xFF)


def attention_layers(llm: Any) -> dict[str, Any]:
    """Attention layers of an engine in this process by name, in order."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if hasattr(layer, "impl")}


def worker(llm: Any) -> Any:
    """The worker of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def metric(llm: Any, name: str) -> int:
    """Value of one of vLLM's counters, such as ``vllm:num_preemptions``."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def scheduler(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm: Any) -> tuple[int, int]:
    """Free blocks and all blocks that requests can own."""
    pool = scheduler(llm).kv_cache_manager.block_pool
    return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1  # one is the null block
