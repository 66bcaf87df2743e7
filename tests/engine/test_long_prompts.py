"""Prompts beyond 4,096 tokens, in small chunks, and again from the prefix cache."""

from __future__ import annotations

import random
from pathlib import Path

from support import engines, models
from support.dense import DenseModel

from kvq_kernels import Format

LENGTHS = [4097, 5000]
NEW_TOKENS = 8


def test_chunks_of_512_and_a_prefix_hit(tmp_path: Path) -> None:
    model = models.tiny_llama(tmp_path, num_hidden_layers=2, max_position_embeddings=8192)
    rng = random.Random(2)
    text = [rng.randrange(3, models.TINY_VOCABULARY) for _ in range(max(LENGTHS))]
    prompts = [text[:n] for n in LENGTHS]
    fmt = Format.create("kvq-int4", 64)
    with engines.engine(
        model,
        kv_cache_dtype="kvq-int4",
        skip_tokenizer_init=True,
        max_model_len=6000,
        max_num_batched_tokens=512,
        enable_prefix_caching=True,
    ) as llm:
        cold = engines.generate(llm, prompts, NEW_TOKENS)
        before = engines.metric(llm, "vllm:prefix_cache_hits")
        warm = engines.generate(llm, prompts, NEW_TOKENS)
        hits = engines.metric(llm, "vllm:prefix_cache_hits") - before
    assert hits == sum((n - 1) // fmt.unit_size * fmt.unit_size for n in LENGTHS)
    reference = DenseModel(model, fmt)
    assert reference.judge(prompts, cold).mismatches == 0
    assert reference.judge(prompts, warm).mismatches == 0
