#!/usr/bin/env python3
"""Ask checkpoints that calibrate.py wrote a question, through kvq-fp8.

python serve.py CHECKPOINT...
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
QUESTION = [{"role": "user", "content": "Which city is the capital of Japan?"}]


def main(folders: list[str]) -> None:
    from vllm import LLM, SamplingParams

    for folder in folders:
        llm = LLM(
            model=folder,
            kv_cache_dtype="kvq-fp8",
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
        )
        sampling = SamplingParams(temperature=0, max_tokens=20)
        answer = llm.chat(QUESTION, sampling, use_tqdm=False)[0].outputs[0].text
        print(f"{folder}: {answer}")
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
