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
    llm: Any, prompts: Sequence[list[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy continuations of token prompts, `max_tokens` each."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        ),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


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
