"""Generate with drafters on vLLM's model runner V2, in Triton's interpreter.

    python interpreted_drafters.py MODEL EAGLE

Prints a JSON object: who drafts to what came of it, :func:`generate`. A program of its own for the
reasons of :mod:`support.interpreted_engine`. The kernels are those for CPUs: what differs on this
runner is the metadata. Eight bits, whose drafts are nearly those of an unquantised cache.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest

from support import engines
from support.interpreted_engine import UNIT_SIZE, use_runner
from support.models import TINY_VOCABULARY

DRAFTS = 3
NEW_TOKENS = 14
LENGTHS = [10, 55, 61, 64, 130]
"""Units end during the first drafts, during later ones, and in the prompt."""


def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(3, TINY_VOCABULARY) for _ in range(n)] for n in LENGTHS]


def generate(model: str, speculation: dict[str, Any] | None) -> dict[str, Any]:
    """Return the tokens, how many drafts were accepted and proposed, and the last ones."""
    with engines.engine(
        model,
        kv_cache_dtype="kvq-int8",
        skip_tokenizer_init=True,
        block_size=UNIT_SIZE,
        max_num_batched_tokens=96,
        max_num_seqs=16,
        additional_config={"kvq": {"unit_size": UNIT_SIZE}},
        speculative_config=speculation and speculation | {"num_speculative_tokens": DRAFTS},
    ) as llm:
        runner = engines.worker(llm).model_runner
        assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner"
        result = {
            "tokens": engines.generate(llm, prompts(), NEW_TOKENS),
            "accepted": engines.metric(llm, "vllm:spec_decode_num_accepted_tokens"),
            "proposed": engines.metric(llm, "vllm:spec_decode_num_draft_tokens"),
        }
        if speculation:
            engines.generate(llm, prompts(), 2)
            drafts = runner.req_states.draft_tokens.tolist()
            result["drafts"] = [row for row in drafts if any(row)]  # other rows are in no use
        return result


def main(model: str, eagle: str) -> None:
    use_runner("V2")
    engines.poison_cache(pytest.MonkeyPatch())
    speculations = {
        "none": None,
        "itself": {"method": "draft_model", "model": model},
        "EAGLE": {"method": "eagle", "model": eagle},
        "EAGLE, unquantised": {"method": "eagle", "model": eagle, "kv_cache_dtype": "auto"},
    }
    print(json.dumps({name: generate(model, config) for name, config in speculations.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
