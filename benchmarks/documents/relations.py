"""Facts that no document of the benchmark has, in other words and of other names: a base learns to read with them
(`benchmarks.documents.reading`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

TABLE = Path(__file__).with_name("relations.txt")
"""One a line: two sentences, two questions, the question by the value, and the values."""


@dataclass(frozen=True)
class Relation:
    """An attribute: sentences and questions with the holes `{n}` (name) and `{v}` (value)."""

    sentences: tuple[str, str]
    questions: tuple[str, str]
    reverse: str
    values: tuple[str, ...]
    """The values, or one kind of drawn ones: name, person, word, words, number or year."""

    def drawn(self, rng: Random, words: Sequence[str]) -> str:
        """Draw a value. `words`: of the language."""
        match self.values:
            case ("name",):
                return _part(rng)
            case ("person",):
                return person(rng)
            case ("word",):
                return rng.choice(words)
            case ("words",):
                return " ".join(rng.sample(words, 2))
            case ("number",):
                return str(rng.randint(3, 9999))
            case ("year",):
                return str(rng.randint(1400, 1999))
            case known:
                return rng.choice(known)


def _relation(line: str) -> Relation:
    plain, other, first, second, reverse, values = line.split("|")
    return Relation((plain, other), (first, second), reverse, tuple(values.split(",")))


RELATIONS = tuple(map(_relation, TABLE.read_text().splitlines()))


def _part(rng: Random) -> str:
    """Draw a name of two or three syllables, each a consonant and a vowel, perhaps with another consonant."""
    syllables = [
        rng.choice("bdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(["", "", "k", "n", "r", "s", "x"])
        for _ in range(rng.choice((2, 2, 3)))
    ]
    return "".join(syllables).capitalize()


def person(rng: Random) -> str:
    """Draw a name: mostly of two parts."""
    return _part(rng) if rng.random() < 0.1 else f"{_part(rng)} {_part(rng)}"
