#!/usr/bin/env python3
"""Calibrate KV cache scales with llm-compressor: a checkpoint for --kv-cache-dtype kvq-fp8.

    python calibrate.py OUT [--strategy attn_head] [--model FOLDER] [--text FILE]

Runs offline on a CPU: by default SmolLM2-135M-Instruct, on news articles that ship with the
package gensim; `make setup` has put both in place. The weights stay as they are. Any causal
language model and any text file with a document a line will do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.setup_env import CORPUS, MODEL

DOCUMENTS = 12
MAX_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the new checkpoint")
    parser.add_argument(
        "--strategy",
        choices=("tensor", "attn_head"),
        default="attn_head",
        help="one scale per layer, or one per kv head",
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--text", type=Path, default=CORPUS, help="a document a line")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    options = parser.parse_args()
    start = time.monotonic()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    documents = options.text.read_text(encoding="utf-8").splitlines()
    documents = [d for d in documents if d.strip()][: options.documents]
    samples = [
        {"input_ids": tokenizer(d, truncation=True, max_length=MAX_TOKENS).input_ids}
        for d in documents
    ]
    recipe = QuantizationModifier(
        kv_cache_scheme={
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "dynamic": False,
            "strategy": options.strategy,
        }
    )
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(samples),
        recipe=recipe,
        max_seq_length=MAX_TOKENS,
        num_calibration_samples=len(samples),
    )
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(
        f"{options.out}: calibrated on {len(samples)} documents in {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
