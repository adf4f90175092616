"""Facts that no document of the benchmark has, in other words and of other names: a base learns to read with them
(`benchmarks.documents.reading`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from benchmarks.documents.facts import FACTS

TABLE = Path(__file__).with_name("relations.txt")
"""One a line: two sentences, two questions, the question by the value, and the values. The last lines have a hole `{w}`
for a word of the language."""
INVENTED = 0.4
"""Share of the relations that are made of those last lines."""
DRAWN = ("name", "person", "word", "words", "number", "year")


@dataclass(frozen=True)
class Relation:
    """An attribute: sentences and questions with the holes `{n}` (name) and `{v}` (value)."""

    sentences: tuple[str, str]
    questions: tuple[str, str]
    reverse: str
    values: tuple[str, ...]
    """The values, or one kind of drawn ones: of `DRAWN`."""

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


_LINES = TABLE.read_text().splitlines()
RELATIONS = tuple(_relation(line) for line in _LINES if "{w}" not in line)
PATTERNS = tuple(line for line in _LINES if "{w}" in line)


def of_benchmark() -> list[Relation]:
    """Return the relations of the benchmark's own documents."""

    def form(text: str) -> str:
        return text.format(name="{n}", value="{v}")

    return [
        Relation(
            (form(fact.sentences[0]), form(fact.sentences[1])),
            (form(fact.questions[0]), form(fact.questions[1])),
            form(fact.reverse),
            tuple(fact.values),
        )
        for fact in FACTS
    ]


def some_relations(rng: Random, count: int, words: Sequence[str]) -> list[Relation]:
    """Draw relations of the table, and others about words of the language: those are new in each document, so that
    their sentences cannot be known by heart."""
    invented = sum(rng.random() < INVENTED for _ in range(count))
    made = (rng.choice(PATTERNS).replace("{w}", rng.choice(words)) for _ in range(invented))
    return [
        *rng.sample(RELATIONS, count - invented),
        *(replace(_relation(line), values=(rng.choice(DRAWN),)) for line in made),
    ]


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
