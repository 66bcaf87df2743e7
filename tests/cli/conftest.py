"""A finished run of ``kvq eval``, with made-up records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.records import FORMATS, records

from kvq_vllm.evaluation import TASKS, Evaluation, Settings
from kvq_vllm.evaluation.files import RunFolder, write_json
from kvq_vllm.evaluation.results import evaluation_of
from kvq_vllm.evaluation.tasks import Prompt, Span


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run of two formats, one of which does much harm."""
    model = tmp_path / "model<i>"
    model.mkdir()
    (model / "config.json").write_text("{}")
    folder = RunFolder(tmp_path / "run")
    spans = tuple(
        Span(kind, depth, 10 * i, 10 * i + 2)
        for i, (kind, depth) in enumerate(
            [("number", 0.0), ("name", 0.3), ("passage", 0.6), ("rule", 0.9)], start=1
        )
    )
    prompts = {task: [Prompt(list(range(300)), spans)] * 3 for task in TASKS}
    folder.start(Settings(model), prompts, {"vllm": "0", "kvq-vllm": "0"})
    rng = np.random.default_rng(0)
    for name, harm in (("auto", 0.0), *FORMATS.items()):
        for task, of_task in records(harm, rng).items():
            write_json(folder.result(name, task), of_task)
    return folder


@pytest.fixture
def evaluation(run: RunFolder) -> Evaluation:
    return evaluation_of(run, list(FORMATS), {"fp8": "this platform has no <fp8>"})
