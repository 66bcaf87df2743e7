"""Texts for the tasks: natural prose, and facts made up from word lists.

The prose is the user's own file, or the part of the Python documentation that every standard
installation of Python carries (the module ``pydoc_data``), so that nothing needs a download.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from kvq_vllm.errors import KVQError

_GIVEN = (
    "Adela Bruno Celia Dmitri Edda Farid Greta Hamid Ilse Jonas Katya Lionel Mara Nuno Odile "
    "Pavel Quentin Rosa Stellan Tamsin Ulrik Vera Wanda Yusuf Zora"
)
_FAMILY = (
    "Abernathy Bjornsson Calloway Delacroix Eriksen Fairweather Grimaldi Hawthorne Ibanez "
    "Jablonski Kowalczyk Lindqvist Montague Nakamura Oldeman Petrakis Quillfeather Ravenscroft "
    "Santangelo Thornbury Underhill Vandermeer Whitlock Yamaguchi Zeller"
)
_PLACES = (
    "Alder Basalt Cinder Dover Ember Falcon Garnet Harbour Indigo Juniper Kestrel Lantern "
    "Marble Nettle Orchard Pewter Quarry Raven Saffron Thistle Umber Velvet Willow Yarrow Zephyr"
)
_WORDS = (
    "anchor basket candle diamond engine feather garden hammer island jacket kettle ladder "
    "mirror needle orange pencil quarter ribbon saddle timber umbrella violin window yellow"
)


@dataclass(frozen=True)
class Fact:
    """Something that can be said early and asked for later.

    Attributes:
        kind: "number" or "name".
        statement: a sentence that says it.
        question: what to ask.
        lead: how the answer begins, up to the fact.
        answer: the fact itself.

    """

    kind: str
    statement: str
    question: str
    lead: str
    answer: str


def facts(rng: random.Random, count: int) -> list[Fact]:
    """Return `count` different facts, numbers and names in turns.

    Raises:
        ValueError: there are not as many places to speak of.

    """
    if count > len(_PLACES.split()):
        raise ValueError(f"at most {len(_PLACES.split())} facts are possible")
    result = []
    for i, place in enumerate(rng.sample(_PLACES.split(), count)):
        if i % 2 == 0:
            number = str(rng.randrange(10000, 100000))
            lead = f"The access code of the {place} office is"
            question = f"What is the access code of the {place} office?"
            result.append(Fact("number", f"{lead} {number}.", question, lead, number))
        else:
            name = f"{rng.choice(_GIVEN.split())} {rng.choice(_FAMILY.split())}"
            lead = f"The keeper of the {place} archive is"
            question = f"Who is the keeper of the {place} archive?"
            result.append(Fact("name", f"{lead} {name}.", question, lead, name))
    return result


def phrase(rng: random.Random, words: int) -> str:
    """Return some unrelated words, which nobody would guess."""
    return " ".join(rng.sample(_WORDS.split(), words))


def prose(path: Path | None) -> list[str]:
    """Return paragraphs of natural text.

    Args:
        path: a UTF-8 file, paragraphs parted by empty lines, or one per line; None for the
            documentation that comes with Python.

    Raises:
        KVQError: the file cannot be read, or there is no text.

    """
    if path is None:
        return _python_documentation()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVQError(
            f"--text {path} cannot be read as UTF-8 text ({error}): name a plain text file."
        ) from None
    parts = re.split(r"\n\s*\n", text)
    if len(parts) < 8:
        parts = text.splitlines()
    paragraphs = [" ".join(part.split()) for part in parts if part.strip()]
    if not paragraphs:
        raise KVQError(f"--text {path} is empty: name a plain text file.")
    return paragraphs


def _python_documentation() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise KVQError(
            "This Python comes without its documentation (pydoc_data), which is the default "
            "text: give a text of your own with --text FILE."
        ) from None
    paragraphs = []
    for name in sorted(topics):
        for part in topics[name].split("\n\n"):
            paragraph = " ".join(part.split())
            # Prose only: not headings, code, grammar or tables.
            if re.match('[A-Za-z"*]', part) and len(paragraph) > 60 and "::=" not in paragraph:
                paragraphs.append(paragraph)
    return list(dict.fromkeys(paragraphs))  # some sections repeat each other
