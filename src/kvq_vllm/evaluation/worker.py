"""One engine in a process of its own: runs tasks, writes a JSON file for each.

    python -m kvq_vllm.evaluation.worker FOLDER CACHE_DTYPE MODE

`FOLDER` is a run's folder, see :mod:`kvq_vllm.evaluation.runner`. Mode "measure" runs the tasks
that have no result yet. Mode "judge", only for ``auto``, scores what the other cache dtypes have
generated. Standard output carries one JSON object per line, of progress or of an error; whatever
vLLM prints goes to standard error.

This is the only module of the evaluation that touches vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kvq_vllm.config import is_kvq
from kvq_vllm.evaluation.files import RunFolder, write_json
from kvq_vllm.evaluation.settings import BASELINE, CHUNK, Settings
from kvq_vllm.evaluation.tasks import Prompt

TOP_LOGPROBS = 1000
MAX_LOGPROBS = 4_000_000  # of one prompt: vLLM keeps them in Python lists, 100 bytes each
TEMPERATURE = 0.8  # greedy decoding ends in loops, with any cache

Record = dict[str, Any]
"""What is kept of one prompt."""


@dataclass(frozen=True)
class Scores:
    """Predictions for a prompt's tokens but the first, ``[n]`` and ``[n, top]``, best first."""

    nll: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, settings: Settings, cache_dtype: str, longest: int) -> None:
        """Start it, for prompts and outputs of up to `longest` tokens together."""
        from vllm import LLM

        arguments: dict[str, Any] = {
            "model": str(settings.model),
            "dtype": settings.dtype,
            "kv_cache_dtype": cache_dtype,
            "max_model_len": longest + 8,
            "max_num_batched_tokens": CHUNK,
            "max_logprobs": TOP_LOGPROBS,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "seed": settings.seed,
        }
        if is_kvq(cache_dtype) and settings.kvq:
            arguments["additional_config"] = {"kvq": dict(settings.kvq)}
        self.llm = LLM(**(arguments | dict(settings.engine)))
        vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.top = min(TOP_LOGPROBS, vocabulary)

    def score(self, prompt: Sequence[int], top: int = 1) -> Scores:
        """Return how likely each token of a prompt was, and the `top` most likely ones."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            prompt_logprobs=min(top, self.top),
            flat_logprobs=True,
            detokenize=False,
        )
        (output,) = self.llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        flat, n = output.prompt_logprobs, len(prompt) - 1
        # Each position has its own token first, then the most likely ones.
        tokens = np.array(flat.token_ids, dtype=np.int32).reshape(n, -1)
        logprobs = np.array(flat.logprobs, dtype=np.float32).reshape(n, -1)
        ranks = np.array(flat.ranks, dtype=np.int32).reshape(n, -1)
        return Scores(-logprobs[:, 0], ranks[:, 0], tokens[:, 1:], logprobs[:, 1:])

    def generate(
        self, prompts: Sequence[Prompt], seed: int, step: Callable[[], None]
    ) -> list[list[int]]:
        """Continue all prompts together, each with a seed of its own; call `step` after each."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=prompt.generate,
                min_tokens=prompt.generate,  # no end of text before that
                temperature=TEMPERATURE,
                seed=seed + i,
                detokenize=False,
            )
            engine.add_request(str(i), {"prompt_token_ids": prompt.tokens}, params)
        outputs: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
            step()
        return [outputs[str(i)] for i in range(len(prompts))]


def kl_divergence(p: Scores, q: Scores) -> np.ndarray:
    """Return KL(p || q) in nats at every position, ``[n]``.

    Taken over the tokens that both list and all others as one: a lower bound of the divergence
    over the whole vocabulary, a few per cent below it.
    """
    result = np.empty(len(p.nll))
    for i in range(len(result)):
        _, in_p, in_q = np.intersect1d(p.tokens[i], q.tokens[i], return_indices=True)
        log_p = p.logprobs[i][in_p].astype(np.float64)
        log_q = q.logprobs[i][in_q].astype(np.float64)
        rest_p = max(1e-9, 1 - np.exp(log_p).sum())
        rest_q = max(1e-9, 1 - np.exp(log_q).sum())
        result[i] = (np.exp(log_p) * (log_p - log_q)).sum() + rest_p * np.log(rest_p / rest_q)
    return result


# --- tasks -------------------------------------------------------------------------------------


class Worker:
    """Runs the tasks of one cache dtype."""

    def __init__(self, folder: RunFolder, cache_dtype: str, replies: TextIO) -> None:
        self.folder = folder
        self.cache_dtype = cache_dtype
        self.settings = folder.settings()
        self.prompts = folder.prompts()
        self.replies = replies
        longest = max(len(p.tokens) + p.generate for ps in self.prompts.values() for p in ps)
        self.engine = Engine(self.settings, cache_dtype, longest)
        self.say(ready=cache_dtype)

    def say(self, **message: Any) -> None:
        print(json.dumps(message), file=self.replies, flush=True)

    def measure(self) -> None:
        """Run every task that has no result yet."""
        for task in self.settings.tasks:
            if self.folder.has_result(self.cache_dtype, task):
                continue
            run = {"next-token": self.next_token, "generation": self.generation}
            records = run.get(task, self.answers)(task)
            write_json(self.folder.result(self.cache_dtype, task), records)

    def next_token(self, task: str) -> list[Record]:
        """Score long texts; the baseline's predictions are kept for the others to compare."""
        records = []
        for i, prompt in enumerate(self.prompts[task]):
            top = min(TOP_LOGPROBS, max(50, MAX_LOGPROBS // len(prompt.tokens)))
            scores = self.engine.score(prompt.tokens, top)
            record = {"nll": _rounded(scores.nll)}
            predictions = self.folder.predictions(i)
            if self.cache_dtype == BASELINE:
                np.savez(predictions, **vars(scores))
            else:
                baseline = Scores(**np.load(predictions, allow_pickle=False))
                record["kl"] = _rounded(kl_divergence(baseline, scores))
                agree = baseline.tokens[:, 0] == scores.tokens[:, 0]
                record["agree"] = agree.astype(int).tolist()
            records.append(record)
            self.say(task=task, done=i + 1, of=len(self.prompts[task]))
        return records

    def answers(self, task: str) -> list[Record]:
        """Score the answers in the prompts of "citation" and "multi-turn"."""
        records = []
        for i, prompt in enumerate(self.prompts[task]):
            scores = self.engine.score(prompt.tokens)
            spans = [slice(span.start - 1, span.end - 1) for span in prompt.spans]
            records.append(
                {
                    "nll": [_rounded(scores.nll[span]) for span in spans],
                    "first_choice": [(scores.rank[s] == 1).astype(int).tolist() for s in spans],
                }
            )
            self.say(task=task, done=i + 1, of=len(self.prompts[task]))
        return records

    def generation(self, task: str) -> list[Record]:
        """Continue texts for a long time."""
        prompts = self.prompts[task]
        total = prompts[0].generate
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            self.say(task=task, done=min(done, total), of=total)

        return [
            {"tokens": tokens} for tokens in self.engine.generate(prompts, self.settings.seed, step)
        ]

    def judge(self) -> None:
        """Score, with the unquantised cache, what every cache dtype has generated."""
        prompts = self.prompts["generation"]
        for cache_dtype in self.folder.to_judge():
            records = self.folder.records(cache_dtype, "generation")
            judged = []
            for i, (prompt, record) in enumerate(zip(prompts, records, strict=True)):
                scores = self.engine.score([*prompt.tokens, *record["tokens"]])
                judged.append({"nll": _rounded(scores.nll[len(prompt.tokens) - 1 :])})
                self.say(task=f"judging {cache_dtype}", done=i + 1, of=len(prompts))
            write_json(self.folder.judgement(cache_dtype), judged)


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 6) for value in values]


def main() -> None:
    folder, cache_dtype, mode = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        worker = Worker(RunFolder(Path(folder)), cache_dtype, replies)
        worker.judge() if mode == "judge" else worker.measure()
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        print(json.dumps({"error": text}), file=replies, flush=True)
        raise


if __name__ == "__main__":
    main()
