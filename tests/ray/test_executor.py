"""vLLM's Ray executor, two workers on one machine: ``make test-ray``.

Ray lies in an overlay of its own, hence ``norecursedirs`` in pyproject.toml.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from support import engines, models, ray_on_cpu
from support.dense import DenseModel

from kvq_kernels import Format

NEW_TOKENS = 40
LENGTHS = [10, 63, 65, 128, 200, 300]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr(CpuPlatform, "ray_device_key", "")  # so that it is undone
    ray_on_cpu.pretend()
    hook = "support.ray_on_cpu.pretend"
    ray.init(
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": hook},
    )
    yield
    ray.shutdown()


def test_two_workers(tmp_path: Path, cluster: None) -> None:
    model = models.tiny_llama(tmp_path / "llama")
    rng = random.Random(4)
    text = [rng.randrange(3, models.TINY_VOCABULARY) for _ in range(1000)]
    prompts = [text[90 * i : 90 * i + n] for i, n in enumerate(LENGTHS)]
    with engines.engine(
        model,
        kv_cache_dtype="kvq-int4",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        additional_config={"kvq": {"unit_size": 64}},
    ) as llm:
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        assert type(executor).__name__.startswith("Ray")
        tokens = engines.generate(llm, prompts, NEW_TOKENS)
    quantised, unquantised = (
        DenseModel(model, fmt).judge(prompts, tokens).mismatches
        for fmt in (Format.create("kvq-int4", 64, 64), None)
    )
    # Two workers' sums are in another order, which may tip one choice.
    assert quantised <= 1
    assert unquantised > 4 * quantised
