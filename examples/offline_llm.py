#!/usr/bin/env python3
"""Offline generation with a quantised cache: one argument more than without.

python examples/offline_llm.py MODEL_FOLDER [CACHE_DTYPE]
"""

import sys

from vllm import LLM, SamplingParams

QUESTIONS = ("Which city is the capital of Japan?", "Name the four seasons of the year.")


def main(model: str, cache_dtype: str = "kvq-int8") -> None:
    llm = LLM(
        model=model,
        kv_cache_dtype=cache_dtype,  # the only line that makes the difference
        max_model_len=2048,
        enforce_eager=True,  # starts faster; leave it out where speed counts
    )
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=40))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question}\n  {output.outputs[0].text.strip()}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
