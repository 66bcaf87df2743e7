"""Records of ``kvq eval`` as an engine would have left them."""

from __future__ import annotations

from typing import Any

import numpy as np

FORMATS = {"kvq-good": 0.001, "kvq-<b>bad</b>": 1.0}
"""Format to the harm that it does, in nats per token."""


def records(harm: float, rng: np.random.Generator) -> dict[str, list[dict[str, Any]]]:
    """Make the records of all tasks, three prompts each."""
    count = range(3)
    answer = {"nll": [[harm, 0.01 + harm]] * 4, "first_choice": [[1, int(harm < 0.1)]] * 4}
    return {
        "next-token": [
            {"nll": [3 + harm] * 299, "kl": [harm] * 299, "agree": [1] * 299} for _ in count
        ],
        "citation": [answer for _ in count],
        "multi-turn": [answer for _ in count],
        "generation": [{"tokens": rng.integers(0, 9999, 400).tolist()} for _ in count],
        "judged": [{"nll": [1 + harm] * 400} for _ in count],
    }
