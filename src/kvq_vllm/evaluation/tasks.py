"""The tasks: what the model is given, and which of its tokens are looked at.

- *next-token*: long texts; every prediction is looked at.
- *citation*: a document with facts and passages at several depths, then questions with their
  answers. The model is given the right answers and asked how likely each of their tokens was, so
  that damage shows long before an answer goes wrong. An answer counts as right if all of its
  tokens were the first choice: what greedy decoding would have written.
- *multi-turn*: a conversation that fixes facts and rules in its first turns, talks about other
  things, then asks; answers as in *citation*.
- *generation*: the beginning of a text, continued for a long time.

By the rule of the kvq formats, a token of a prompt sees exactly what a generated token at its
position would see.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvq_vllm.errors import KVQError
from kvq_vllm.evaluation import text
from kvq_vllm.evaluation.settings import CHUNK, Size

MAX_FACTS = 12
MAX_PASSAGES = 3
PASSAGE_LEAD_WORDS = 12
PASSAGE_WORDS = 30
RULES = 3
GENERATION_PROMPT = 60


class Tokenizer(Protocol):
    """What we use of a Hugging Face tokenizer."""

    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: str, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Span:
    """Tokens ``[start, end)`` of a prompt that are an answer.

    Attributes:
        kind: "number", "name", "passage" or "rule".
        depth: where its source stands: 0 at the start of the prompt, 1 at its end.

    """

    kind: str
    depth: float
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """Tokens to score, or to continue by `generate` more.

    Attributes:
        tokens: token ids.
        spans: the tokens that are looked at; empty for all of them.
        generate: tokens to generate.

    """

    tokens: list[int]
    spans: tuple[Span, ...] = ()
    generate: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Prompt:
        spans = tuple(Span(**span) for span in data["spans"])
        return cls(data["tokens"], spans, data["generate"])


def build_prompts(
    tokenizer: Tokenizer, paragraphs: Sequence[str], size: Size, seed: int
) -> dict[str, list[Prompt]]:
    """Make the prompts of all tasks.

    Args:
        tokenizer: of the model, a fast one: it must say where in the text its tokens lie.
        paragraphs: natural text.
        size: number and length of the prompts, which the model must be able to hold.
        seed: of everything that is drawn.

    Raises:
        KVQError: the text is too short.

    """
    source = _Source(tokenizer, paragraphs)
    return {
        "next-token": [source.window(size.context) for _ in range(size.prompts)],
        "citation": [
            _citation(source, size.context, random.Random(f"citation {seed} {i}"))
            for i in range(size.prompts)
        ],
        "multi-turn": [
            _conversation(source, size.context, random.Random(f"multi-turn {seed} {i}"))
            for i in range(size.prompts)
        ],
        "generation": _openings(source, size),
    }


class _Source:
    """Deals out the text, a different part to every prompt, from the start again at its end."""

    def __init__(self, tokenizer: Tokenizer, paragraphs: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.paragraphs = paragraphs
        self.next = 0
        bos = tokenizer.bos_token_id
        self.bos = [] if bos is None else [bos]

    def paragraph(self) -> str:
        self.next += 1
        return self.paragraphs[(self.next - 1) % len(self.paragraphs)]

    def length(self, string: str) -> int:
        return len(self.encode(string)[0])

    def encode(self, string: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return token ids, and which characters each stands for."""
        encoded = self.tokenizer(string, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def window(self, length: int) -> Prompt:
        """Return a prompt of exactly `length` tokens.

        Raises:
            KVQError: all the text there is, is shorter.

        """
        tokens: list[int] = []
        parts: list[str] = []
        while len(tokens) < length:
            if len(parts) >= len(self.paragraphs):
                raise KVQError(
                    f"The text has fewer than {length} tokens: give a longer one with --text, or "
                    "a smaller --context."
                )
            # Some at a time: tokenising after each paragraph would be quadratic.
            parts += [self.paragraph() for _ in range(8)]
            tokens = [*self.bos, *self.encode("\n\n".join(parts))[0]]
        return Prompt(tokens[:length])

    def paragraphs_of(self, length: int) -> list[str]:
        """Return paragraphs of about `length` tokens together, not more, at least one."""
        parts = [self.paragraph()]
        left = length - self.length(parts[0]) - 2
        while (used := self.length(following := self.paragraph()) + 2) <= left:
            parts.append(following)
            left -= used
        return parts


@dataclass(frozen=True)
class _Answer:
    """Text that ends a stretch of the prompt and is looked at."""

    kind: str
    depth: float
    before: str
    text: str


def _citation(source: _Source, context: int, rng: random.Random) -> Prompt:
    """A document, then questions about it with their answers."""
    facts = text.facts(rng, max(4, min(MAX_FACTS, context // 200)))
    num_passages = max(1, min(MAX_PASSAGES, context // 1000))
    questions = {f: f"Question: {f.question}\nAnswer: {f.lead}" for f in facts}
    reserved = sum(source.length(f"{f.statement} {questions[f]} {f.answer}.\n\n") for f in facts)
    reserved += num_passages * 3 * (PASSAGE_LEAD_WORDS + PASSAGE_WORDS) + 60
    filler = source.paragraphs_of(max(64, context - reserved))

    document: list[str] = []
    answers: list[_Answer] = []
    places = _spread(len(facts), len(filler))
    passages = _passages(filler, num_passages)
    for i, paragraph in enumerate(filler):
        depth = i / len(filler)
        here = [fact for fact, place in zip(facts, places, strict=True) if place == i]
        document.append(" ".join([*(f.statement for f in here), paragraph]))
        answers += [_Answer(f.kind, depth, questions[f], f.answer) for f in here]
        if i in passages:
            words = paragraph.split()
            lead = " ".join(words[:PASSAGE_LEAD_WORDS])
            rest = " ".join(words[PASSAGE_LEAD_WORDS:][:PASSAGE_WORDS])
            question = f"Question: Which paragraph begins like this?\nAnswer, word for word: {lead}"
            answers.append(_Answer("passage", depth, question, rest))
    rng.shuffle(answers)
    head = "Read this document.\n\n" + "\n\n".join(document) + "\n\nQuestions on the document.\n\n"
    return _prompt(source, head, answers, context, separator=".\n\n")


def _spread(count: int, slots: int) -> list[int]:
    """Return `count` evenly spread slot numbers, the first and the last slot among them."""
    return [round(i * (slots - 1) / max(1, count - 1)) for i in range(count)]


def _passages(filler: Sequence[str], count: int) -> set[int]:
    """Choose paragraphs to be quoted: long enough, and unlike any other in their beginning."""
    needed = PASSAGE_LEAD_WORDS + PASSAGE_WORDS
    begins = [tuple(paragraph.split()[:PASSAGE_LEAD_WORDS]) for paragraph in filler]
    fit = [
        i
        for i, paragraph in enumerate(filler)
        if len(paragraph.split()) >= needed and begins.count(begins[i]) == 1
    ]
    return {fit[i] for i in _spread(min(count, len(fit)), len(fit))}


def _prompt(
    source: _Source, head: str, answers: Sequence[_Answer], context: int, separator: str
) -> Prompt:
    """Join `head` and the answers, as many as fit, and find the answers' tokens."""
    string = head
    found: list[tuple[_Answer, int]] = []
    for answer in answers:
        string += f"{answer.before} "
        found.append((answer, len(string)))
        string += f"{answer.text}{separator}"
    return _with_spans(source, string, source.bos, found, context)


def _with_spans(
    source: _Source,
    string: str,
    bos: list[int],
    answers: Sequence[tuple[_Answer, int]],
    context: int,
) -> Prompt:
    """Tokenise, and find the tokens of answers that begin at the given characters."""
    tokens, offsets = source.encode(string)
    spans = []
    for answer, start in answers:
        end = start + len(answer.text)
        inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > max(a, start)]
        first, last = len(bos) + inside[0], len(bos) + inside[-1]
        spans.append(Span(answer.kind, round(answer.depth, 4), first, last + 1))
    tokens = [*bos, *tokens][:context]
    return Prompt(tokens, tuple(span for span in spans if span.end <= len(tokens)))


def _conversation(source: _Source, context: int, rng: random.Random) -> Prompt:
    """Facts and rules first, other things in between, then the questions."""
    facts = text.facts(rng, MAX_FACTS // 2)
    rules = [(text.phrase(rng, 2), text.phrase(rng, 4)) for _ in range(RULES)]
    said = [f"Please remember this. {f.statement}" for f in facts]
    said += [f"A rule: whenever I say “{word}”, answer “{reply}”." for word, reply in rules]
    asked = [(f.question, _Answer(f.kind, 0, f"{f.lead} ", f.answer)) for f in facts]
    asked += [(f"{word.capitalize()}.", _Answer("rule", 0, "", reply)) for word, reply in rules]
    order = rng.sample(range(len(said)), len(said))

    turns = [_turn(message, "I will remember that.") for message in said]
    checks = [_turn(q, f"{a.before}{a.text}") for q, a in (asked[i] for i in order)]
    used = source.length(_render(source, [*turns, *checks]))
    turns += [
        _turn("Tell me about something else.", paragraph)
        for paragraph in source.paragraphs_of(max(64, (context - used) * 3 // 4))
    ]
    rendered = _render(source, [*turns, *checks])
    found, position = [], 0
    for i, (user, assistant) in zip(order, checks, strict=True):
        # Nothing said before reads like a question, whatever the template adds in between.
        position = rendered.index(user["content"], position) + len(user["content"])
        position = rendered.index(assistant["content"], position)
        answer = replace(asked[i][1], depth=i / (len(turns) + len(checks)))
        found.append((answer, position + len(answer.before)))
    # A template writes the first token itself, where the model wants one.
    bos = source.bos if source.tokenizer.chat_template is None else []
    return _with_spans(source, rendered, bos, found, context)


def _turn(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _render(source: _Source, turns: Sequence[list[dict[str, str]]]) -> str:
    """Put the conversation in the form that the model was trained on, or a plain one."""
    messages = [message for turn in turns for message in turn]
    if source.tokenizer.chat_template is None:
        return "".join(f"{m['role'].capitalize()}: {m['content']}\n\n" for m in messages)
    rendered: str = source.tokenizer.apply_chat_template(messages, tokenize=False)
    return rendered


def _openings(source: _Source, size: Size) -> list[Prompt]:
    """Beginnings of texts, so short that all of them are read in one step."""
    length = min(GENERATION_PROMPT, CHUNK // size.prompts, size.context // 4)
    prompts = []
    for _ in range(size.prompts):
        opening = source.window(length)
        prompts.append(Prompt(opening.tokens, generate=size.generated))
    return prompts
