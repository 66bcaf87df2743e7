"""Drafter models: the target's tokens are those without speculation, whatever is drafted.

The drafters are the target with noise in its weights, so that some drafts are accepted and most
are not, and the target itself, all of whose drafts must be accepted: that shows that the
drafter's own cache is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import engines, models
from support.checkpoints import perturbed
from support.dense import DenseModel
from support.fp8 import at_scale_one

from kvq_kernels import Format
from kvq_kernels.fp8 import is_fp8

NEW_TOKENS = 40
DRAFTS = 4
UNIT_SIZE = 64
# Units end during the prompt, during the first drafts and during later ones.
LENGTHS = [10, 58, 61, 63, 64, 65, 120, 127, 128, 200]
INHERIT = None
"""Without a dtype of its own, the drafter has the target's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return models.tiny_llama(folder / "target")


@pytest.fixture(scope="module")
def noisy(target: Path, folder: Path) -> Path:
    return perturbed(target, folder / "noisy", 0.02)


@pytest.fixture(scope="module")
def other_shape(folder: Path) -> Path:
    """A drafter with fewer layers, one kv head and a smaller head size."""
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32}
    return models.tiny_llama(folder / "other", **sizes)


@pytest.fixture(scope="module")
def eagle(folder: Path) -> Path:
    return models.tiny_eagle(folder / "eagle")


def prompts() -> list[list[int]]:
    rng = random.Random(2)
    text = [rng.randrange(3, models.TINY_VOCABULARY) for _ in range(1000)]
    return [text[60 * i : 60 * i + n] for i, n in enumerate(LENGTHS)]


def start(target: Path, name: str, **options: Any) -> Any:
    kvq = {} if is_fp8(name) else {"unit_size": UNIT_SIZE}
    return engines.engine(
        target,
        kv_cache_dtype=name,
        skip_tokenizer_init=True,
        block_size=UNIT_SIZE,
        additional_config={"kvq": kvq},
        **options,
    )


def speculation(drafter: Path, dtype: str | None, **options: Any) -> dict[str, Any]:
    config = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    return config | ({} if dtype is INHERIT else {"kv_cache_dtype": dtype}) | options


@cache
def plain(target: Path, name: str) -> list[list[int]]:
    """Tokens without speculation, which the dense reference confirms."""
    with start(target, name) as llm:
        tokens = engines.generate(llm, prompts(), NEW_TOKENS)
    fmt = at_scale_one(name, 64) if is_fp8(name) else Format.create(name, 64, UNIT_SIZE)
    assert DenseModel(target, fmt).judge(prompts(), tokens).mismatches == 0
    return tokens


def drafted(llm: Any) -> tuple[int, int]:
    """How many drafts were accepted, and how many there were."""
    names = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")
    accepted, proposed = (engines.metric(llm, name) for name in names)
    return accepted, proposed


def assert_all_blocks_are_free(llm: Any) -> None:
    free, total = engines.free_blocks(llm)
    assert free == total


@pytest.mark.parametrize("dtype", [INHERIT, "auto", "kvq-int8"])
def test_a_draft_model_with_rejections_across_units(
    target: Path, noisy: Path, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(target, "kvq-int4")
    engines.poison_cache(monkeypatch)
    config = speculation(noisy, dtype)
    with start(target, "kvq-int4", speculative_config=config, enable_prefix_caching=True) as llm:
        for _ in range(2):  # the second time with prefix hits
            tokens = engines.generate(llm, prompts(), NEW_TOKENS)
            assert tokens == expected
            assert_all_blocks_are_free(llm)
        assert engines.metric(llm, "vllm:prefix_cache_hits") > 0
        accepted, proposed = drafted(llm)
    assert 0.05 * proposed < accepted < 0.5 * proposed


@pytest.mark.parametrize("name", ["kvq-int4", "kvq-fp8"])
def test_all_drafts_of_the_target_itself_are_accepted(target: Path, name: str) -> None:
    """Both caches follow the same rule, so both models say the same."""
    expected, config = plain(target, name), speculation(target, INHERIT)
    options = {"max_num_batched_tokens": 97, "max_num_seqs": 16}  # prompts come in chunks
    with start(target, name, speculative_config=config, **options) as llm:
        assert engines.generate(llm, prompts(), NEW_TOKENS) == expected
        accepted, proposed = drafted(llm)
    # The last drafts of a request go beyond its last token.
    assert proposed - accepted <= DRAFTS * len(LENGTHS)
    assert accepted > 0.75 * proposed


@pytest.mark.parametrize("dtype", [INHERIT, "auto"])
def test_a_draft_model_of_another_shape(target: Path, other_shape: Path, dtype: str | None) -> None:
    expected = plain(target, "kvq-k8v4")
    with start(target, "kvq-k8v4", speculative_config=speculation(other_shape, dtype)) as llm:
        assert engines.generate(llm, prompts(), NEW_TOKENS) == expected


def test_preempted_while_speculating(target: Path, noisy: Path) -> None:
    expected = plain(target, "kvq-int4")
    with start(
        target,
        "kvq-int4",
        speculative_config=speculation(noisy, INHERIT),
        max_model_len=512,
        num_gpu_blocks_override=40,
    ) as llm:
        assert engines.generate(llm, prompts(), NEW_TOKENS) == expected
        assert engines.metric(llm, "vllm:num_preemptions") > 0
        assert_all_blocks_are_free(llm)


def test_up_to_the_longest_length(target: Path, noisy: Path) -> None:
    """Drafts beyond ``max_model_len`` are neither written nor used."""
    longest = max(LENGTHS) + NEW_TOKENS
    expected = plain(target, "kvq-int4")
    with start(
        target,
        "kvq-int4",
        speculative_config=speculation(noisy, INHERIT),
        max_model_len=longest,
    ) as llm:
        assert engines.generate(llm, prompts(), NEW_TOKENS) == expected


@pytest.mark.parametrize("dtype", [INHERIT, "auto"])
def test_eagle(
    target: Path, eagle: Path, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(target, "kvq-int4")
    engines.poison_cache(monkeypatch)
    config = speculation(eagle, dtype, method="eagle")
    with start(target, "kvq-int4", speculative_config=config, enable_prefix_caching=True) as llm:
        for _ in range(2):
            tokens = engines.generate(llm, prompts(), NEW_TOKENS)
            assert tokens == expected
            assert_all_blocks_are_free(llm)
        assert engines.metric(llm, "vllm:prefix_cache_hits") > 0


def test_eagle_drafts_the_same_on_an_8_bit_cache(target: Path, eagle: Path) -> None:
    """The head is random, so hardly any draft is accepted: compare what it drafts instead."""
    unquantised = _first_drafts(target, speculation(eagle, "auto", method="eagle"))
    quantised = _first_drafts(target, speculation(eagle, INHERIT, method="eagle"))
    assert unquantised.shape == (len(LENGTHS), DRAFTS)
    assert len(unquantised.unique()) > DRAFTS  # it says this and that
    assert (quantised == unquantised).float().mean() > 0.9


def _first_drafts(target: Path, config: dict[str, Any]) -> torch.Tensor:
    """What follows each prompt according to the drafter, ``[num_prompts, DRAFTS]``."""
    drafts = []
    with start(target, "kvq-int8", speculative_config=config, max_num_seqs=1) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        for prompt in prompts():
            engines.generate(llm, [prompt], 2)
            drafts.append(worker.model_runner._draft_token_ids)
    return torch.cat(drafts)


@pytest.fixture(autouse=True, scope="module")
def _forget_tokens() -> Iterator[None]:
    yield
    plain.cache_clear()
