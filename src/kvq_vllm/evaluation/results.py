"""From records to results: every format against the unquantised cache, prompt by prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from kvq_vllm.evaluation.files import RunFolder
from kvq_vllm.evaluation.settings import BASELINE
from kvq_vllm.evaluation.statistics import Estimate, estimate, paired
from kvq_vllm.evaluation.tasks import Prompt
from kvq_vllm.evaluation.verdict import (
    ANSWERS,
    CITATION,
    COPYING,
    DRIFT,
    KL,
    NLL,
    REPETITION,
    TURN_ANSWERS,
    TURNS,
    Criterion,
    Finding,
    Verdict,
    find,
    overall,
    reason,
    uninformative,
)

Records = list[dict[str, Any]]

NEEDED_ACCURACY = 0.5
"""Share that the unquantised model must get right for a task to say anything about the cache."""
TOO_REPETITIVE = 0.5
NGRAM = 4
SEGMENTS = 8


@dataclass(frozen=True)
class Bucket:
    """An average over a range, of positions or of depth.

    Attributes:
        low: start of the range.
        high: its end.
        values: what was averaged, by name.

    """

    low: float
    high: float
    values: dict[str, Estimate]


@dataclass(frozen=True)
class FormatResult:
    """One cache dtype compared with ``auto``.

    Attributes:
        cache_dtype: value of ``--kv-cache-dtype``.
        verdict: the worst of the findings.
        reasons: in words, the deciding ones first.
        findings: one per criterion.
        agreement: share of positions with the same first choice, next-token.
        by_position: "kl", "delta_nll" and "agreement" by position in the text.
        by_depth: "delta_nll" of citations, by depth of their source.
        divergence: per long generation, the first token that differs from ``auto``'s, or None.
        repetition: share of repeated 4-grams in the tails.
        drift: change of NLL under the unquantised model along the generations, in equal segments.

    """

    cache_dtype: str
    verdict: Verdict
    reasons: list[str]
    findings: list[Finding]
    agreement: Estimate | None
    by_position: list[Bucket]
    by_depth: list[Bucket]
    divergence: list[int | None]
    repetition: Estimate | None
    drift: list[Estimate]


@dataclass(frozen=True)
class Baseline:
    """How the unquantised model does, as far as it was measured.

    Attributes:
        nll: of the texts.
        answers: share of answers that it gets right, by task.
        repetition: share of repeated 4-grams in the tails of its long generations.

    """

    nll: Estimate | None
    answers: dict[str, Estimate]
    repetition: Estimate | None


@dataclass(frozen=True)
class Evaluation:
    """All results of a run.

    Attributes:
        model: name of the model's folder.
        settings: as :meth:`Settings.as_json`.
        versions: of the software.
        baseline: the unquantised model's own results.
        formats: one per cache dtype.
        unavailable: cache dtypes that this platform or model does not have, and why.

    """

    model: str
    settings: dict[str, Any]
    versions: dict[str, str]
    baseline: Baseline
    formats: list[FormatResult]
    unavailable: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return what ``json.dumps`` takes."""
        return asdict(self)


def evaluation_of(
    run: RunFolder, formats: Sequence[str], unavailable: dict[str, str]
) -> Evaluation:
    """Put together what a run's folder holds.

    Args:
        run: the folder; every task of every format must be done.
        formats: in the order in which they are shown.
        unavailable: what could not run, and why.

    """
    settings = run.settings()
    header = run.header()
    prompts, tasks = run.prompts(), settings.tasks

    def records(cache_dtype: str) -> dict[str, Records]:
        found = {task: run.records(cache_dtype, task) for task in tasks}
        if "generation" in tasks:
            found["judged"] = run.records(cache_dtype, "judged")
        return found

    before = records(BASELINE)
    return Evaluation(
        model=settings.model.resolve().name,
        settings=settings.as_json(),
        versions=header["versions"],
        baseline=_baseline(before),
        formats=[_compare(name, prompts, before, records(name)) for name in formats],
        unavailable=unavailable,
    )


def _baseline(records: dict[str, Records]) -> Baseline:
    return Baseline(
        nll=estimate([fmean(r["nll"]) for r in records["next-token"]])
        if "next-token" in records
        else None,
        answers={
            task: estimate([_right(r) for r in records[task]])
            for task in ("citation", "multi-turn")
            if task in records
        },
        repetition=_repetition(records["generation"]) if "generation" in records else None,
    )


def _compare(
    name: str,
    prompts: dict[str, list[Prompt]],
    before: dict[str, Records],
    after: dict[str, Records],
) -> FormatResult:
    findings: list[Finding] = []
    agreement, repetition = None, None
    by_position: list[Bucket] = []
    by_depth: list[Bucket] = []
    divergence: list[int | None] = []
    drift: list[Estimate] = []
    if "next-token" in after:
        old, new = before["next-token"], after["next-token"]
        findings += [
            find(KL, estimate([fmean(r["kl"]) for r in new])),
            find(NLL, paired([fmean(r["nll"]) for r in new], [fmean(r["nll"]) for r in old])),
        ]
        agreement = estimate([fmean(r["agree"]) for r in new])
        by_position = _by_position(old, new)
    if "citation" in after:
        task = (prompts["citation"], before["citation"], after["citation"])
        findings += [
            _answer_nll(CITATION, *task, kinds=("number", "name")),
            _answer_nll(COPYING, *task, kinds=("passage",)),
            _answers_lost(ANSWERS, *task[1:]),
        ]
        by_depth = _by_depth(*task)
    if "multi-turn" in after:
        task = (prompts["multi-turn"], before["multi-turn"], after["multi-turn"])
        findings += [
            _answer_nll(TURNS, *task, kinds=("number", "name", "rule")),
            _answers_lost(TURN_ANSWERS, *task[1:]),
        ]
    if "generation" in after:
        findings += _tails(before, after)
        repetition = _repetition(after["generation"])
        divergence = [
            _first_difference(new["tokens"], old["tokens"])
            for old, new in zip(before["generation"], after["generation"], strict=True)
        ]
        drift = [
            paired([s[i] for s in _segments(after)], [s[i] for s in _segments(before)])
            for i in range(SEGMENTS)
        ]
    decisive = sorted(findings, key=lambda f: -f.verdict.rank)
    return FormatResult(
        cache_dtype=name,
        verdict=overall(findings),
        reasons=[reason(finding) for finding in decisive],
        findings=findings,
        agreement=agreement,
        by_position=by_position,
        by_depth=by_depth,
        divergence=divergence,
        repetition=repetition,
        drift=drift,
    )


# --- next-token --------------------------------------------------------------------------------


def _by_position(before: Records, after: Records) -> list[Bucket]:
    """Average by position: the first 128, then doubling ranges."""
    length = len(after[0]["nll"])
    edges = [0, 128]
    while edges[-1] < length:
        edges.append(min(length, edges[-1] * 2))
    buckets = []
    for low, high in itertools.pairwise(edges):
        cut = slice(low, high)
        values = {
            "kl": estimate([fmean(r["kl"][cut]) for r in after]),
            "delta_nll": paired(
                [fmean(r["nll"][cut]) for r in after], [fmean(r["nll"][cut]) for r in before]
            ),
            "agreement": estimate([fmean(r["agree"][cut]) for r in after]),
        }
        buckets.append(Bucket(low, high, values))
    return buckets


# --- answers -----------------------------------------------------------------------------------


def _right(record: dict[str, Any]) -> float:
    """Return the share of a prompt's answers of which every token was the first choice."""
    return fmean(all(answer) for answer in record["first_choice"])


def _answers_lost(criterion: Criterion, before: Records, after: Records) -> Finding:
    known = fmean(_right(r) for r in before)
    if known < NEEDED_ACCURACY:
        return uninformative(
            criterion, f"the unquantised model gets only {known:.0%} of the answers right"
        )
    return find(criterion, paired([_right(r) for r in before], [_right(r) for r in after]))


def _answer_nll(
    criterion: Criterion,
    prompts: Sequence[Prompt],
    before: Records,
    after: Records,
    kinds: tuple[str, ...],
) -> Finding:
    """Compare the mean NLL of the tokens of some kinds of answers."""

    def of(records: Records, key: str) -> list[list[float]]:
        chosen = [
            [x for s, xs in zip(p.spans, r[key], strict=True) if s.kind in kinds for x in xs]
            for p, r in zip(prompts, records, strict=True)
        ]
        return [values for values in chosen if values]

    if not of(before, "nll"):
        return uninformative(criterion, "the prompts are too short to have any")
    known = fmean(fmean(values) for values in of(before, "first_choice"))
    if known < NEEDED_ACCURACY:
        return uninformative(
            criterion, f"the unquantised model gets only {known:.0%} of the tokens right"
        )
    return find(criterion, paired(*([fmean(v) for v in of(r, "nll")] for r in (after, before))))


def _by_depth(prompts: Sequence[Prompt], before: Records, after: Records) -> list[Bucket]:
    """Average the answers' ΔNLL by quarters of depth, as far as every prompt has some there."""

    def of(records: Records, low: float, high: float) -> list[list[float]]:
        return [
            [
                x
                for span, xs in zip(prompt.spans, record["nll"], strict=True)
                if low <= span.depth < high
                for x in xs
            ]
            for prompt, record in zip(prompts, records, strict=True)
        ]

    buckets = []
    for low in (0.0, 0.25, 0.5, 0.75):
        new, old = of(after, low, low + 0.25), of(before, low, low + 0.25)
        if all(new):
            delta = paired([fmean(x) for x in new], [fmean(x) for x in old])
            buckets.append(Bucket(low, low + 0.25, {"delta_nll": delta}))
    return buckets


# --- generation --------------------------------------------------------------------------------


def _tails(before: dict[str, Records], after: dict[str, Records]) -> list[Finding]:
    old, new = _repetitions(before["generation"]), _repetitions(after["generation"])
    if fmean(old) > TOO_REPETITIVE:
        why = f"the unquantised model repeats itself ({fmean(old):.0%} of its 4-grams)"
        return [uninformative(DRIFT, why), uninformative(REPETITION, why)]
    return [
        find(DRIFT, paired(_tail_nll(after["judged"]), _tail_nll(before["judged"]))),
        find(REPETITION, paired(new, old)),
    ]


def _tail_nll(judged: Records) -> list[float]:
    """Mean NLL of the last quarter of each generation."""
    return [fmean(r["nll"][-len(r["nll"]) // 4 :]) for r in judged]


def _segments(records: dict[str, Records]) -> list[list[float]]:
    """Mean NLL of each generation in SEGMENTS equal parts."""
    result = []
    for record in records["judged"]:
        nll = record["nll"]
        edges = [i * len(nll) // SEGMENTS for i in range(SEGMENTS + 1)]
        result.append([fmean(nll[a:b]) for a, b in itertools.pairwise(edges)])
    return result


def _repetitions(records: Records) -> list[float]:
    return [repetition(record["tokens"]) for record in records]


def _repetition(records: Records) -> Estimate:
    return estimate(_repetitions(records))


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of 4-grams in the second half that occurred before."""
    seen: set[tuple[int, ...]] = set()
    repeated: list[bool] = []
    for i in range(len(tokens) - NGRAM + 1):
        gram = tuple(tokens[i : i + NGRAM])
        repeated.append(gram in seen)
        seen.add(gram)
    return fmean(repeated[len(repeated) // 2 :])


def _first_difference(a: Iterable[int], b: Iterable[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
