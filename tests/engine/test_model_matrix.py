"""Every kind of model with every format: the same tokens as the dense reference.

``make support-matrix`` writes docs/models.md from the results.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import engines, models
from support.dense import DenseModel
from support.fp8 import at_scale_one
from support.model_matrix import FORMATS, SERVED, ModelKind

from kvq_kernels import Format
from kvq_kernels.fp8 import is_fp8

UNIT_SIZE = 64
LENGTHS = [10, 63, 64, 65, 129, 200]
NEW_TOKENS = 30


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    # The last few tokens of the vocabulary stand for images.
    text = [rng.randrange(3, models.TINY_VOCABULARY - 8) for _ in range(600)]
    return [text[:n] if n % 2 else text[300 : 300 + n] for n in LENGTHS]


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
    # Weights of the usual range amplify rounding, and fp8 rounds much.
    folder = model.make(tmp_path, **({"initializer_range": 0.1} if is_fp8(name) else {}))
    chunked = {"max_num_batched_tokens": 97, "max_num_seqs": 16}
    with engines.engine(folder, **options_of(name), **chunked, **model.options) as llm:
        tokens = engines.generate(llm, prompts(), NEW_TOKENS)
    assert reference(folder, model, name).judge(prompts(), tokens).mismatches == 0
    if name != "kvq-int8":  # 8 bits differ too little to change a first choice here
        assert DenseModel(folder, None).judge(prompts(), tokens).mismatches > 0
