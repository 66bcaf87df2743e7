"""Means with standard errors, taken over prompts.

Tokens of one prompt are not independent, so a prompt counts as one observation: its mean, or its
difference to the same prompt under the unquantised cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        mean: of the prompts' own means.
        error: its standard error; None with fewer than two prompts.
        prompts: how many.

    """

    mean: float
    error: float | None
    prompts: int

    @property
    def margin(self) -> float:
        """Half width of the 95% confidence interval; infinite with fewer than two prompts."""
        if self.error is None:
            return float("inf")
        freedom = self.prompts - 1
        return self.error * (_T95[freedom - 1] if freedom <= len(_T95) else 2.0)


def estimate(per_prompt: Sequence[float]) -> Estimate:
    """Return mean and standard error of one number per prompt.

    Raises:
        ValueError: there is none.

    """
    n = len(per_prompt)
    if n == 0:
        raise ValueError("no prompts to average over")
    mean = sum(per_prompt) / n
    if n == 1:
        return Estimate(mean, None, 1)
    variance = sum((x - mean) ** 2 for x in per_prompt) / (n - 1)
    return Estimate(mean, sqrt(variance / n), n)


def paired(after: Sequence[float], before: Sequence[float]) -> Estimate:
    """Return the mean difference ``after - before``, one pair per prompt."""
    return estimate([a - b for a, b in zip(after, before, strict=True)])
