"""From measurements to a verdict: safe, usable or broken.

Each measure has two limits. With 95% confidence intervals it counts as

- *broken* where it is above the second limit beyond doubt,
- *usable* where it is above the first limit beyond doubt, or likely above the second,
- *not informative* where the interval is so wide that safe and broken cannot be told apart,
- *safe* otherwise.

A format is as good as the worst of its measures. Those that are not informative, also because the
unquantised model itself fails, take no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvq_vllm.evaluation.statistics import Estimate


class Verdict(StrEnum):
    """What to expect of a format on this model."""

    SAFE = "safe"
    USABLE = "usable"
    BROKEN = "broken"
    UNKNOWN = "not informative"

    @property
    def rank(self) -> int:
        return [Verdict.UNKNOWN, Verdict.SAFE, Verdict.USABLE, Verdict.BROKEN].index(self)


@dataclass(frozen=True)
class Criterion:
    """What is measured, and its limits.

    Attributes:
        task: one of the tasks.
        name: what is measured.
        unit: of the measure and the limits.
        safe: above it, a difference is noticeable.
        broken: above it, nobody should use the format.

    """

    task: str
    name: str
    unit: str
    safe: float
    broken: float

    def judge(self, estimate: Estimate) -> Verdict:
        low = estimate.mean - estimate.margin
        if low > self.broken:
            return Verdict.BROKEN
        if low > self.safe:
            return Verdict.USABLE
        if estimate.margin > self.broken:
            return Verdict.UNKNOWN
        return Verdict.USABLE if estimate.mean > self.broken else Verdict.SAFE


KL = Criterion("next-token", "KL divergence", "nats", 0.005, 0.05)
NLL = Criterion("next-token", "ΔNLL of the text", "nats per token", 0.01, 0.05)
CITATION = Criterion("citation", "ΔNLL of numbers and names", "nats per token", 0.05, 0.2)
COPYING = Criterion("citation", "ΔNLL of copied passages", "nats per token", 0.05, 0.2)
ANSWERS = Criterion("citation", "answers lost", "of all", 0.05, 0.3)
TURNS = Criterion("multi-turn", "ΔNLL of facts and rules", "nats per token", 0.05, 0.2)
TURN_ANSWERS = Criterion("multi-turn", "answers lost", "of all", 0.05, 0.3)
DRIFT = Criterion("generation", "ΔNLL of the tail", "nats per token", 0.2, 1.0)
REPETITION = Criterion("generation", "more repetition in the tail", "of 4-grams", 0.1, 0.4)

CRITERIA = (KL, NLL, CITATION, COPYING, ANSWERS, TURNS, TURN_ANSWERS, DRIFT, REPETITION)


@dataclass(frozen=True)
class Finding:
    """One criterion applied to one format.

    Attributes:
        criterion: what was measured.
        estimate: the result, or None where it is not informative.
        verdict: on this criterion alone.
        note: why it is not informative, else empty.

    """

    criterion: Criterion
    estimate: Estimate | None
    verdict: Verdict
    note: str = ""


def find(criterion: Criterion, estimate: Estimate) -> Finding:
    return Finding(criterion, estimate, criterion.judge(estimate))


def uninformative(criterion: Criterion, why: str) -> Finding:
    return Finding(criterion, None, Verdict.UNKNOWN, why)


def overall(findings: list[Finding]) -> Verdict:
    """Return the worst verdict of the findings."""
    return max((f.verdict for f in findings), key=lambda v: v.rank, default=Verdict.UNKNOWN)


def reason(finding: Finding) -> str:
    """Say in words what a finding is based on."""
    criterion, estimate = finding.criterion, finding.estimate
    if estimate is None:
        return f"{criterion.task}: {criterion.name} not informative, {finding.note}"
    error = "" if estimate.error is None else f" ± {estimate.error:.2g}"
    value = f"{criterion.task}: {criterion.name} {estimate.mean:.3g}{error} {criterion.unit}"
    if finding.verdict is Verdict.UNKNOWN:
        return f"{value} is too uncertain to say, with {estimate.prompts} prompts"
    if finding.verdict is Verdict.SAFE:
        return f"{value} is not above {criterion.safe:g}"
    limit = criterion.broken if estimate.mean > criterion.broken else criterion.safe
    doubt = "" if estimate.mean - estimate.margin > limit else ", though not beyond doubt"
    return f"{value} is above {limit:g}{doubt}"
