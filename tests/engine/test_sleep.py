"""Sleep mode: the same tokens after waking, whatever the device forgot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import engines, models, sleep
from test_fp8_engines import checkpoint, start
from test_models import prompts

from kvq_kernels.dispatch import select_kernels

NEW_TOKENS = 20
INPUTS = slice(4, 7)  # a token more than a unit, two units, and some more
BLOCKS = 100


def scales_of(llm: Any) -> torch.Tensor:
    """Every scale that a layer holds, in all of vLLM's copies."""
    names = [f"_{x}_scale{copy}" for x in "kv" for copy in ("", "_float", "_cpu")]
    scales = [getattr(x, name) for x in engines.attention_layers(llm).values() for name in names]
    return torch.cat([torch.as_tensor(scale).reshape(-1) for scale in scales])


def kernels_with_a_table(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Make kernels keep a table on the device, as Triton's do; return where it will be."""
    tables: list[torch.Tensor] = []

    def prepare(fmt: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
        if not tables:
            tables.append(torch.arange(4.0).to(device, copy=True))
        return tuple(tables)

    monkeypatch.setattr(select_kernels(torch.device("cpu")), "prepare", prepare)
    return tables


@pytest.mark.parametrize(
    ("name", "options", "strategy"),
    [
        ("kvq-int4", None, None),
        ("kvq-fp8", None, "tensor"),
        ("kvq-fp8", None, "attn_head"),
        ("kvq-fp8", {"scales": "warmup"}, None),
        ("kvq-fp8", {"scales": "warmup", "scale_per": "tensor"}, None),
    ],
    ids=["int4", "per tensor", "per head", "warm-up per head", "warm-up per tensor"],
)
def test_sleep_and_wake(
    name: str,
    options: dict[str, Any] | None,
    strategy: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.tiny_llama(tmp_path / "plain", initializer_range=models.CALM)
    if strategy is not None:
        model = checkpoint(model, tmp_path / "scaled", strategy)
    allocator = sleep.make_possible(monkeypatch)
    tables = kernels_with_a_table(monkeypatch)
    inputs = prompts()[INPUTS]
    with start(
        model, name, kvq=options, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS
    ) as llm:
        tokens, scales = engines.generate(llm, inputs, NEW_TOKENS), scales_of(llm)
        if name == "kvq-fp8":
            assert scales.min() > 0
            assert not (scales == 1).all()

        llm.sleep(level=1)
        assert allocator.discarded == {"kv_cache"}
        llm.wake_up()
        assert engines.generate(llm, inputs, NEW_TOKENS) == tokens

        llm.sleep(level=2)
        assert allocator.discarded == {"kv_cache", "weights"}
        llm.wake_up()
        weights = engines.worker(llm).model_runner.get_model().parameters()
        assert all(weight.isnan().all() for weight in weights)
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        assert torch.equal(scales_of(llm), scales)
        assert len(tables) == (name == "kvq-int4")
        assert all(table.tolist() == [0, 1, 2, 3] for table in tables)
        assert engines.generate(llm, inputs, NEW_TOKENS) == tokens
