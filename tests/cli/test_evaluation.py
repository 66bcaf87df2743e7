"""``kvq eval`` without an engine: statistics, verdicts, tasks, and a run of made-up records."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import smollm2
from support.records import FORMATS

from kvq_vllm.errors import KVQError
from kvq_vllm.evaluation import Evaluation, Settings, Size, Verdict, text
from kvq_vllm.evaluation.files import RunFolder, write_json
from kvq_vllm.evaluation.results import evaluation_of, repetition
from kvq_vllm.evaluation.runner import _first_line, check_formats, check_model
from kvq_vllm.evaluation.settings import TASKS
from kvq_vllm.evaluation.statistics import Estimate, estimate, paired
from kvq_vllm.evaluation.tasks import Prompt, build_prompts
from kvq_vllm.evaluation.verdict import REPETITION, Criterion, find, overall, reason, uninformative
from kvq_vllm.evaluation.worker import Scores, kl_divergence

CRITERION = Criterion("task", "harm", "nats", safe=0.1, broken=0.5)

# --- statistics and verdicts -------------------------------------------------------------------


def test_standard_error_is_that_of_the_mean_over_prompts() -> None:
    values = [1.0, 2.0, 4.0]
    result = estimate(values)
    assert result.mean == pytest.approx(np.mean(values))
    assert result.error == pytest.approx(np.std(values, ddof=1) / np.sqrt(3))
    assert result.margin == pytest.approx(4.30 * result.error)


def test_pairs_cancel_what_prompts_have_in_common() -> None:
    before = [1.0, 50.0, 7.0]
    after = [x + 0.5 for x in before]
    assert paired(after, before) == Estimate(0.5, 0.0, 3)
    with pytest.raises(ValueError, match="shorter"):
        paired(after, before[:2])


def test_one_prompt_has_no_error() -> None:
    assert estimate([1.0]).error is None
    assert estimate([1.0]).margin == float("inf")
    with pytest.raises(ValueError, match="no prompts"):
        estimate([])


@pytest.mark.parametrize(
    ("mean", "error", "verdict"),
    [
        (0.05, 0.01, Verdict.SAFE),
        (0.12, 0.01, Verdict.SAFE),  # within the uncertainty of the first limit
        (0.30, 0.01, Verdict.USABLE),
        (0.52, 0.10, Verdict.USABLE),  # may be below the second limit
        (0.05, 0.30, Verdict.UNKNOWN),
        (0.90, 0.01, Verdict.BROKEN),
        (2.00, 0.30, Verdict.BROKEN),  # uncertain, but not about this
        (-3.0, 0.01, Verdict.SAFE),
    ],
)
def test_verdict_needs_evidence(mean: float, error: float, verdict: Verdict) -> None:
    finding = find(CRITERION, Estimate(mean, error, 8))
    assert finding.verdict is verdict
    assert f"{mean:.3g}" in reason(finding)


def test_a_format_is_as_good_as_its_worst_measure() -> None:
    safe, broken = (find(CRITERION, Estimate(x, 0.01, 8)) for x in (0.0, 0.9))
    unknown = uninformative(CRITERION, "the model cannot do it")
    assert overall([safe, unknown]) is Verdict.SAFE
    assert overall([safe, broken, unknown]) is Verdict.BROKEN
    assert overall([unknown]) is Verdict.UNKNOWN


def scores(logits: np.ndarray, top: int) -> Scores:
    """The `top` most likely tokens, as an engine reports them."""
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = np.argsort(-logprobs, axis=-1)[:, :top]
    ranked = np.take_along_axis(logprobs, tokens, -1)
    first = np.zeros(len(logits))
    return Scores(first, first, tokens.astype(np.int32), ranked.astype(np.float32))


def test_kl_is_exact_with_all_tokens_and_a_lower_bound_with_some() -> None:
    rng = np.random.default_rng(0)
    p = 2 * rng.normal(size=(20, 300))
    q = p + 0.2 * rng.normal(size=p.shape)
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    exact = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    np.testing.assert_allclose(kl_divergence(scores(p, 300), scores(q, 300)), exact, atol=1e-5)
    bound = kl_divergence(scores(p, 100), scores(q, 100))
    assert (bound <= exact + 1e-6).all()
    assert bound.mean() > 0.5 * exact.mean()


def test_repetition() -> None:
    assert repetition(list(range(100))) == 0
    assert repetition([1, 2, 3, 4, 5] * 40) == 1


# --- tasks -------------------------------------------------------------------------------------

SIZE = Size(prompts=2, context=1024, generated=100)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2()))


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> dict[str, list[Prompt]]:
    return build_prompts(tokenizer, text.prose(None), SIZE, seed=0)


def test_prompts_have_the_size_asked_for(prompts: dict[str, list[Prompt]]) -> None:
    assert set(prompts) == set(TASKS)
    for task, of_task in prompts.items():
        assert len(of_task) == SIZE.prompts
        assert len({tuple(p.tokens) for p in of_task}) == SIZE.prompts, f"{task}: all the same"
        for prompt in of_task:
            assert len(prompt.tokens) <= SIZE.context
    assert all(len(p.tokens) == SIZE.context for p in prompts["next-token"])
    for task in ("citation", "multi-turn"):
        assert all(len(p.tokens) > 0.7 * SIZE.context for p in prompts[task])
    assert {p.generate for p in prompts["generation"]} == {SIZE.generated}


@pytest.mark.parametrize("task", ["citation", "multi-turn"])
def test_answers_are_where_the_spans_are_and_were_said_before(
    tokenizer: Any, prompts: dict[str, list[Prompt]], task: str
) -> None:
    for prompt in prompts[task]:
        kinds = {span.kind for span in prompt.spans}
        assert kinds == {"number", "name", "passage" if task == "citation" else "rule"}
        for span in prompt.spans:
            answer = tokenizer.decode(prompt.tokens[span.start : span.end]).strip()
            words = {"number": 1, "name": 2, "passage": 30, "rule": 4}[span.kind]
            assert len(answer.split()) == words
            before = tokenizer.decode(prompt.tokens[: span.start])
            assert answer in before
            assert 0 <= span.depth < 1


def test_prompts_follow_from_the_seed(tokenizer: Any, prompts: dict[str, list[Prompt]]) -> None:
    again = build_prompts(tokenizer, text.prose(None), SIZE, seed=0)
    other = build_prompts(tokenizer, text.prose(None), SIZE, seed=1)
    assert again == prompts
    assert other["citation"] != prompts["citation"]


def test_a_model_without_a_chat_template(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, prompts: dict[str, list[Prompt]]
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (prompt, _) = build_prompts(tokenizer, text.prose(None), SIZE, seed=0)["multi-turn"]
    said = tokenizer.decode(prompt.tokens)
    assert "User: " in said
    assert "Assistant: " in said
    numbers = [s for s in prompt.spans if s.kind == "number"]
    assert numbers
    for span in numbers:
        assert tokenizer.decode(prompt.tokens[span.start : span.end]).strip().isdigit()


def test_a_text_that_is_too_short(tokenizer: Any) -> None:
    with pytest.raises(KVQError, match=r"fewer than 1024 tokens: give a longer one with --text"):
        build_prompts(tokenizer, ["Only this."], SIZE, seed=0)


def test_a_text_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One\nline.\n\n" * 10)
    assert text.prose(file) == ["One line."] * 10
    file.write_text("First.\nSecond.\n")
    assert text.prose(file) == ["First.", "Second."]
    for unusable in (tmp_path / "missing", tmp_path):
        with pytest.raises(KVQError, match=r"--text .* cannot be read"):
            text.prose(unusable)


def test_facts_differ() -> None:
    facts = text.facts(random.Random(0), 12)
    assert len({fact.question for fact in facts}) == 12
    assert {fact.kind for fact in facts} == {"number", "name"}


# --- what cannot work --------------------------------------------------------------------------


def test_models_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(KVQError, match="is not a folder"):
        check_model(tmp_path / "missing")
    with pytest.raises(KVQError, match=r"has no config\.json"):
        check_model(tmp_path)


def test_formats_that_do_not_exist() -> None:
    check_formats(["auto", "kvq-int4", "fp8"])
    with pytest.raises(KVQError, match="no format kvq-int3: choose from kvq-int8"):
        check_formats(["kvq-int3"])
    with pytest.raises(KVQError, match="for debugging and needs KVQ_DEBUG_FORMATS=1"):
        check_formats(["kvq-debug-int4-per-token"])


def test_sizes_and_tasks_are_checked(tmp_path: Path) -> None:
    with pytest.raises(KVQError, match="prompts is 1"):
        Settings(tmp_path, size=Size(1, 1024, 100))
    with pytest.raises(KVQError, match="Unknown task 'chess'"):
        Settings(tmp_path, tasks=("chess",))


def test_long_errors_become_one_line() -> None:
    report = (
        "1 validation error for ModelConfig\n  Value error, Model architectures are not supported. "
        "[type=value_error, input_value=1]\n    For further information"
    )
    assert _first_line(report) == "Model architectures are not supported."
    assert _first_line("No room\nat all") == "No room."


# --- a whole run, of made-up records -----------------------------------------------------------


def test_verdicts_of_a_run(evaluation: Evaluation) -> None:
    good, bad = evaluation.formats
    assert good.verdict is Verdict.SAFE
    assert bad.verdict is Verdict.BROKEN
    assert "above 0.05" in bad.reasons[0]
    harm = {f.criterion: f.estimate.mean for f in bad.findings if f.estimate}
    assert harm.pop(REPETITION) == pytest.approx(0, abs=0.01)
    assert all(value == pytest.approx(1.0) for value in harm.values()), harm
    assert len(harm) == 8
    assert [bucket.high for bucket in good.by_position] == [128, 256, 299]
    assert len(good.by_depth) == 4
    assert good.divergence[0] is not None
    json.dumps(evaluation.as_json())


def test_what_the_unquantised_model_cannot_do_says_nothing(run: RunFolder) -> None:
    for task in ("citation", "multi-turn"):
        for name in ("auto", *FORMATS):
            records = run.records(name, task)
            for record in records:
                record["first_choice"] = [[0, 0]] * 4
            write_json(run.result(name, task), records)
    write_json(run.result("auto", "generation"), [{"tokens": [1, 2] * 200}] * 3)
    bad = evaluation_of(run, list(FORMATS), {}).formats[1]
    informative = [f.criterion.task for f in bad.findings if f.estimate]
    assert informative == ["next-token", "next-token"]
    assert any("gets only 0% of the answers right" in r for r in bad.reasons)
    assert any("repeats itself (100% of its 4-grams)" in r for r in bad.reasons)


def test_a_folder_belongs_to_one_configuration(run: RunFolder, tmp_path: Path) -> None:
    settings, prompts = run.settings(), run.prompts()
    versions = {"vllm": "0", "kvq-vllm": "0"}
    run.start(settings, prompts, versions)  # the same again
    with pytest.raises(KVQError, match=r"holds results of another model.*--out"):
        run.start(settings, prompts, versions | {"vllm": "1"})
    other = Settings(settings.model, dtype="float32")
    with pytest.raises(KVQError, match="holds results of another model"):
        run.start(other, prompts, versions)
    with pytest.raises(KVQError, match="is not empty and holds no run"):
        RunFolder(tmp_path).start(settings, prompts, versions)


def test_settings_survive_the_file(run: RunFolder) -> None:
    settings = Settings(run.settings().model, text=Path("a"), kvq={"unit_size": 64})
    assert Settings.from_json(json.loads(json.dumps(settings.as_json()))) == settings
    assert Prompt.from_json(asdict(run.prompts()["citation"][0])) == run.prompts()["citation"][0]
