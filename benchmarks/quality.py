#!/usr/bin/env python3
"""How far a quantised cache moves the model's predictions, measured through vLLM.

    python benchmarks/quality.py [--json out.json] [--windows 3]
    python benchmarks/quality.py --fp8 [CHECKPOINT...]

Scores windows of news text with ``prompt_logprobs``. By the rule that decides which positions
are read quantised, a prompt token sees exactly what a decoded token at its position would see.

The KL divergence to ``--kv-cache-dtype auto`` is taken over the tokens that both runs report
among their most likely ones, and all others as one: a lower bound, about 4% below the
divergence over the whole vocabulary.
Standard errors treat positions as independent.

With ``--fp8`` it compares where fp8 scales come from: 1.0, measured at start-up, and those of
checkpoints that ``examples/calibrate_fp8`` wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.setup_env import CORPUS, MODEL

DTYPES = ("kvq-int8", "kvq-k8v4", "kvq-int4")
FP8_SCALES: tuple[tuple[str, dict[str, object]], ...] = (
    ("kvq-fp8", {"scales": "ones"}),
    ("kvq-fp8", {"scales": "warmup", "scale_per": "tensor"}),
    ("kvq-fp8", {"scales": "warmup", "scale_per": "head"}),
    ("kvq-fp8_e5m2", {"scales": "ones"}),
    ("kvq-fp8_e5m2", {"scales": "warmup", "scale_per": "head"}),
)
WINDOW = 1500
TOP_LOGPROBS = 1000
BOS = 1  # SmolLM2's <|im_start|>, which begins every conversation


@dataclass(frozen=True)
class Quality:
    """Distance of one cache dtype to the unquantised cache.

    Attributes:
        cache_dtype: value of ``--kv-cache-dtype``.
        positions: number of predictions compared.
        kl: mean KL divergence, in nats.
        kl_error: its standard error.
        delta_nll: mean change of the text's negative log likelihood, in nats.
        delta_nll_error: its standard error.
        top1_agreement: share of positions with the same most likely token.

    """

    cache_dtype: str
    positions: int
    kl: float
    kl_error: float
    delta_nll: float
    delta_nll_error: float
    top1_agreement: float


@dataclass(frozen=True)
class Predictions:
    """Most likely tokens at every position, ``[positions, TOP_LOGPROBS]``, best first.

    ``nll`` ``[positions]`` belongs to the text's own next token.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    nll: np.ndarray


def windows(count: int) -> list[list[int]]:
    """The first `count` windows of the corpus, each starting a new sequence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = CORPUS.read_text(encoding="utf-8")[: 8 * count * WINDOW]
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    size = WINDOW - 1
    return [[BOS, *tokens[i * size : (i + 1) * size]] for i in range(count)]


def predict(cache_dtype: str, count: int, options: dict[str, object], model: str) -> Predictions:
    """Score the windows with an engine in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        kv_cache_dtype=cache_dtype,
        max_model_len=WINDOW + 8,
        max_logprobs=TOP_LOGPROBS,
        additional_config={"kvq": options} if cache_dtype != "auto" else {},
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=TOP_LOGPROBS, detokenize=False)
    prompts = [{"prompt_token_ids": window} for window in windows(count)]
    tokens, logprobs, nll = [], [], []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        for token, ranked in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
        ):
            best = sorted(ranked.items(), key=lambda item: item[1].rank)[:TOP_LOGPROBS]
            tokens.append([t for t, _ in best])
            logprobs.append([value.logprob for _, value in best])
            nll.append(-ranked[token].logprob)
    return Predictions(np.array(tokens), np.array(logprobs), np.array(nll))


def kl_divergence(p: Predictions, q: Predictions) -> np.ndarray:
    """KL(p || q) at every position, over the tokens that both list and the rest as one."""
    result = np.empty(len(p.nll))
    for i in range(len(result)):
        _, in_p, in_q = np.intersect1d(p.tokens[i], q.tokens[i], return_indices=True)
        log_p, log_q = p.logprobs[i][in_p], q.logprobs[i][in_q]
        rest_p = max(1e-9, 1 - np.exp(log_p).sum())
        rest_q = max(1e-9, 1 - np.exp(log_q).sum())
        result[i] = (np.exp(log_p) * (log_p - log_q)).sum() + rest_p * np.log(rest_p / rest_q)
    return result


def compare(cache_dtype: str, p: Predictions, q: Predictions) -> Quality:
    """Compare a quantised run `q` with the unquantised run `p`."""
    kl, delta = kl_divergence(p, q), q.nll - p.nll
    root = sqrt(len(kl))
    return Quality(
        cache_dtype=cache_dtype,
        positions=len(kl),
        kl=float(kl.mean()),
        kl_error=float(kl.std() / root),
        delta_nll=float(delta.mean()),
        delta_nll_error=float(delta.std() / root),
        top1_agreement=float((p.tokens[:, 0] == q.tokens[:, 0]).mean()),
    )


def predict_in_own_process(
    cache_dtype: str, count: int, options: str, model: Path = MODEL
) -> Predictions:
    """Run :func:`predict` in a fresh interpreter, because an engine leaves state behind."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "predictions.npz"
        arguments = ["--child", cache_dtype, str(out), "--windows", str(count)]
        subprocess.run(
            [sys.executable, __file__, *arguments, "--options", options, "--model", str(model)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return Predictions(**np.load(out))


def measure(dtypes: Sequence[str], count: int, options: str = "{}") -> list[Quality]:
    """Compare each cache dtype with "auto" on `count` windows.

    Args:
        dtypes: values of ``--kv-cache-dtype``.
        count: windows of 1,500 tokens, 1,499 positions each.
        options: JSON for ``additional_config["kvq"]``.

    """
    auto = predict_in_own_process("auto", count, "{}")
    return [compare(d, auto, predict_in_own_process(d, count, options)) for d in dtypes]


def measure_fp8(checkpoints: Sequence[Path], count: int) -> list[Quality]:
    """Compare fp8 with each source of scales with "auto"; `cache_dtype` says which."""
    auto = predict_in_own_process("auto", count, "{}")
    rows = []
    for cache_dtype, options in FP8_SCALES:
        label = " ".join([cache_dtype, *map(str, options.values())])
        predictions = predict_in_own_process(cache_dtype, count, json.dumps(options))
        rows.append(compare(label, auto, predictions))
    for checkpoint in checkpoints:
        predictions = predict_in_own_process("kvq-fp8", count, "{}", checkpoint)
        rows.append(compare(f"kvq-fp8 {checkpoint.name}", auto, predictions))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--windows", type=int, default=3, help="windows of 1,500 tokens")
    parser.add_argument("--options", default="{}", help='JSON for additional_config["kvq"]')
    parser.add_argument("--fp8", nargs="*", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--model", default=str(MODEL), help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if options.child:
        cache_dtype, out = options.child
        predictions = predict(
            cache_dtype, options.windows, json.loads(options.options), options.model
        )
        np.savez(out, **vars(predictions))
        return
    if options.fp8 is not None:
        rows = measure_fp8(options.fp8, options.windows)
    else:
        rows = measure(DTYPES, options.windows, options.options)
    width = max(len(r.cache_dtype) for r in rows)
    titles = f"{'positions':>9} {'KL x1e-3':>16} {'dNLL x1e-3':>16} {'top-1 %':>8}"
    print(f"{'cache dtype':{width}} {titles}")
    for r in rows:
        print(
            f"{r.cache_dtype:{width}} {r.positions:9} {r.kl * 1e3:8.3f} ±{r.kl_error * 1e3:6.3f} "
            f"{r.delta_nll * 1e3:+8.2f} ±{r.delta_nll_error * 1e3:6.2f} "
            f"{r.top1_agreement * 100:8.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
