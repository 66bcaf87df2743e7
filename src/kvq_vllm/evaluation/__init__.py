"""Measure what a quantised cache does to a model, against the unquantised cache.

    from pathlib import Path
    from kvq_vllm.evaluation import Settings, evaluate

    result = evaluate(Settings(Path("MODEL")), ["kvq-int4"], Path("results"))
    print(result.formats[0].verdict)

Needs vLLM; every cache dtype runs in a process of its own. ``kvq eval`` is the same on the
command line.
"""

from kvq_vllm.evaluation.results import Evaluation, FormatResult
from kvq_vllm.evaluation.runner import Progress, evaluate
from kvq_vllm.evaluation.settings import FULL, QUICK, TASKS, Settings, Size
from kvq_vllm.evaluation.verdict import CRITERIA, Criterion, Finding, Verdict

__all__ = [
    "CRITERIA",
    "FULL",
    "QUICK",
    "TASKS",
    "Criterion",
    "Evaluation",
    "Finding",
    "FormatResult",
    "Progress",
    "Settings",
    "Size",
    "Verdict",
    "evaluate",
]
