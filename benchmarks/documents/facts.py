"""Invented documents: facts of people, drawn by a seed, and questions about them that no document words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal["template", "reversed", "two_facts", "unanswerable", "choice"]
KINDS: tuple[Kind, ...] = ("template", "reversed", "two_facts", "unanswerable", "choice")
LETTERS = "ABCD"
"""Of a choice's options."""
MADE = KINDS[:4]

_SYLLABLES = re.findall(r"\w+", "bra cor den fel gri hol jar kel lom mer nor ost pel quin ras sol tam ul ver wen yor")
_VALUES = {
    "city": "Tellmark, Brovek, Ostrand, Lindholm, Quarrel, Sundby, Marrow, Ketter, Fennick, Aldova, Pristol, Varn",
    "trade": "glassblower, cartographer, beekeeper, locksmith, botanist, saddler, clockmaker, potter, diver, falconer",
    "animal": "heron, otter, lynx, badger, raven, tortoise, goat, marten, kestrel, hedgehog",
    "food": "barley soup, smoked trout, plum cake, rye bread, pickled beets, honey wafers, lentil stew, goat cheese",
    "subject": "geology, music, astronomy, law, medicine, philosophy, chemistry, history, mathematics, painting",
    "year": ", ".join(str(year) for year in range(1701, 1990)),
}


@dataclass(frozen=True)
class Fact:
    """An attribute: sentences of the document, questions that are asked, and a question by the value."""

    name: str
    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    reverse: str

    @property
    def values(self) -> list[str]:
        return _VALUES[self.name].split(", ")


FACTS = (
    Fact(
        "city",
        ("{name} was born in {value}.", "{value} is the town where {name} came into the world."),
        ("In which town was {name} born?", "Where was {name} born?"),
        "Who was born in {value}?",
    ),
    Fact(
        "trade",
        ("{name} worked as a {value}.", "For a living, {name} was a {value}."),
        ("What did {name} work as?", "What was the occupation of {name}?"),
        "Who worked as a {value}?",
    ),
    Fact(
        "animal",
        ("{name} kept a tame {value}.", "A tame {value} lived in the house of {name}."),
        ("Which animal did {name} keep?", "What pet did {name} have?"),
        "Who kept a tame {value}?",
    ),
    Fact(
        "food",
        ("The favourite food of {name} was {value}.", "{name} liked {value} more than any other food."),
        ("What was the favourite food of {name}?", "Which food did {name} like most?"),
        "Whose favourite food was {value}?",
    ),
    Fact(
        "subject",
        ("{name} studied {value} at the university.", "At the university, {name} chose {value}."),
        ("Which subject did {name} study?", "What did {name} study at the university?"),
        "Who studied {value} at the university?",
    ),
    Fact(
        "year",
        ("{name} was married in {value}.", "The wedding of {name} was in {value}."),
        ("In which year was {name} married?", "When did {name} marry?"),
        "Who was married in {value}?",
    ),
)


@dataclass(frozen=True)
class Question:
    kind: Kind
    text: str
    answers: tuple[str, ...]
    """All must be in a right answer; for an unanswerable question, none of the document's values; for a choice, its
    letter."""


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    questions: tuple[Question, ...]


def documents(count: int, people: int, questions: int, seed: int) -> Iterator[Document]:
    """Yield invented documents. Names and values are the documents' own: no name is in two of them. `questions`: of the
    kind `template`, and a quarter as many of each other kind; fewer if the document has fewer."""
    rng = Random(seed)
    names = list(dict.fromkeys(_name(rng) for _ in range(4 * count * people + 64)))
    for index in range(count):
        own = names[index * people : (index + 1) * people]
        yield _document(f"document-{seed}-{index}", own, names[-1 - index], questions, rng)


def _document(name: str, people: list[str], stranger: str, count: int, rng: Random) -> Document:
    values = {fact.name: _drawn(fact.values, len(people), rng) for fact in FACTS}
    paragraphs = []
    for index, person in enumerate(people):
        facts = rng.sample(FACTS, len(FACTS))
        lines = [rng.choice(f.sentences).format(name=person, value=values[f.name][index]) for f in facts]
        paragraphs.append(" ".join(lines))
    asked = [*_questions(people, values, stranger, rng)]
    rng.shuffle(asked)
    most = {kind: count if kind == "template" else -(-count // len(MADE)) for kind in MADE}
    chosen = [question for kind in MADE for question in [q for q in asked if q.kind == kind][: most[kind]]]
    return Document(name, "\n\n".join(paragraphs), tuple(chosen))


def _questions(people: list[str], values: dict[str, list[str]], stranger: str, rng: Random) -> Iterator[Question]:
    for fact in FACTS:
        yield Question("unanswerable", rng.choice(fact.questions).format(name=stranger), tuple(values[fact.name]))
        for index, person in enumerate(people):
            value = values[fact.name][index]
            yield Question("template", rng.choice(fact.questions).format(name=person), (value,))
            if values[fact.name].count(value) == 1:
                yield Question("reversed", fact.reverse.format(value=value), (person,))
            other = rng.choice([each for each in FACTS if each is not fact])
            first, second = (rng.choice(each.questions).format(name=person) for each in (fact, other))
            yield Question("two_facts", f"{first} {second}", (value, values[other.name][index]))


def _drawn(values: list[str], count: int, rng: Random) -> list[str]:
    """Draw values, each once as long as there are enough."""
    return rng.sample(values, count) if count <= len(values) else rng.choices(values, k=count)


def _name(rng: Random) -> str:
    first, last = ("".join(rng.sample(_SYLLABLES, 2)).capitalize() for _ in range(2))
    return f"{first} {last}"
