"""What a base learns reading from: drawn documents with many questions, and rows of tokens in which the questions
share their document.

A row is made of trees. A tree is a prefix (a document in the prompt) and branches (a question and its answer), each of
which sees the prefix and itself alone. So a document is read once for all its questions.

Letters: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks.documents.arms import in_prompt
from benchmarks.documents.facts import FACTS
from benchmarks.documents.relations import RELATIONS, Relation, person, some_relations
from coserve.core.schemas.generation import GenerateRequest
from coserve.data.documents.prompts import KINDS, Prompts

PROMPTS = Prompts(chat=True, instruction="Answer in one short sentence.")
"""Those of the daemon's own jobs."""
ABSENT = "The text does not say."
EVERYTHING = "What is known about {n}?"
MOST_DOCUMENT, LEAST_TREE = 1700, 400
"""Tokens of a document at most, and of a row's rest in which no further tree begins."""
GIVEN = 0.3
"""Share of the documents that have given relations, if there are some."""
LONGEST_COPY = 64
"""Tokens."""
COPIES = 40
"""First batches, which are of random tokens, repeated: a base that cannot copy does not learn to read."""
RAMP = 100
"""Further batches until documents have the most people."""


class Told(NamedTuple):
    """A fact of a drawn document."""

    name: str
    relation: Relation
    value: str
    sentence: str
    """As the document words it."""

    def worded(self, form: str) -> str:
        return form.format(n=self.name, v=self.value)


@dataclass(frozen=True)
class Tree:
    """Token ids of a prefix, and of each branch's prompt and answer."""

    prefix: list[int]
    branches: list[tuple[list[int], list[int]]]


@dataclass
class Rows:
    """Rows of tokens (B, T), int64. `tree` is -1 for padding; `branch` is 0 in a prefix."""

    ids: Tensor
    positions: Tensor
    tree: Tensor
    branch: Tensor
    at: list[int] = field(default_factory=list)
    """Indices, in the flattened rows, of tokens whose next token is learned."""
    labels: list[int] = field(default_factory=list)
    """These next tokens."""

    def mask(self) -> Tensor:
        """(B, 1, T, T), bool: what each token attends to."""
        q, k = self.branch[:, :, None], self.branch[:, None]
        own = (self.tree[:, :, None] == self.tree[:, None]) & ((k == 0) | (q == k))
        return (own & torch.ones_like(own[0]).tril())[:, None]


def known_words(vocabulary: Sequence[str]) -> list[str]:
    """Return words that are one token of a byte-level vocabulary and no value of the benchmark's own facts."""
    taken = {word for fact in FACTS for value in fact.values for word in value.split()}
    found = (token[1:] for token in vocabulary if token[:1] == "\u0120")
    return sorted(
        w for w in found if w.isascii() and w.isalpha() and w.islower() and 4 <= len(w) <= 9 and w not in taken
    )


def told(
    rng: Random, people: int, words: Sequence[str], given: Sequence[Relation] = ()
) -> tuple[list[list[Told]], str]:
    """Draw the facts of each person, and their text. `given`: the relations of a part of the documents (`GIVEN`)."""
    relations = some_relations(rng, rng.randint(3, 8), words)
    if given and rng.random() < GIVEN:
        relations = list(given)
    names = list(dict.fromkeys(person(rng) for _ in range(people)))
    found = list[list[Told]]()
    for name in names:
        own = rng.sample(relations, rng.randint(max(2, len(relations) - 1), len(relations)))
        values = [relation.drawn(rng, words) for relation in own]
        forms = [rng.choice(relation.sentences) for relation in own]
        found.append(
            [
                Told(name, relation, value, _upper(form.format(n=name, v=value)))
                for relation, value, form in zip(own, values, forms, strict=True)
            ]
        )
    if rng.random() < 0.15:
        lines = [each.sentence for own in found for each in own]
        rng.shuffle(lines)
        return found, "\n".join(lines)
    return found, "\n\n".join(" ".join(each.sentence for each in own) for own in found)


def asked(rng: Random, facts: Sequence[Sequence[Told]]) -> list[tuple[str, str, str]]:
    """Return questions, answers and for some the sentence that is asked about, in random order. An answer is the
    document's own sentence: what is learned is to find it, whatever it is about."""
    every = [each for own in facts for each in own]
    found = list[tuple[str, str, str]]()
    for own in facts:
        for each, other in pairwise([*own, own[0]]):
            hint = each.sentence if rng.random() < 0.15 else ""
            found.append((each.worded(rng.choice(each.relation.questions)), each.sentence, hint))
            same = sum(e.relation is each.relation and e.value == each.value for e in every)
            if same == 1 and rng.random() < 0.5:
                found.append((each.worded(each.relation.reverse), each.sentence, hint))
            if rng.random() < 0.25:
                two = (each.worded(each.relation.questions[0]), other.worded(other.relation.questions[0]))
                found.append((" ".join(two), f"{each.sentence} {other.sentence}", ""))
        if rng.random() < 0.3:
            found.append((EVERYTHING.format(n=own[0].name), " ".join(each.sentence for each in own), ""))
        stranger, some = person(rng), rng.choice(own).relation
        if rng.random() < 0.15:
            found.append((rng.choice(some.questions).format(n=stranger, v=""), ABSENT, ""))
        absent = [relation for relation in RELATIONS if relation not in [each.relation for each in own]]
        if rng.random() < 0.05:
            found.append((rng.choice(rng.choice(absent).questions).format(n=own[0].name, v=""), ABSENT, ""))
    rng.shuffle(found)
    return found


class Reading:
    """Makes rows by seed. `end`: id of the end of a turn; `given`: relations of documents, but not of questions that
    are asked for."""

    def __init__(self, tokenizer: Any, end: int, given: Sequence[Relation] = ()) -> None:  # noqa: ANN401 - transformers
        self._tokenizer, self._end, self._given = tokenizer, end, given
        self._plain = sorted({*range(len(tokenizer))}.difference(tokenizer.all_special_ids))
        self._words = known_words(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) or ["oar", "nut"]

    def encode(self, text: str) -> list[int]:
        """Return token ids, special tokens in the text included."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def chat(self, *said: dict[str, str]) -> str:
        """Return messages in the base's template, up to the answer."""
        found: str = self._tokenizer.apply_chat_template(list(said), add_generation_prompt=True, tokenize=False)
        return found

    def ask(self, text: str) -> list[int]:
        """Return the prompt of one message."""
        return self.encode(self.chat(_user(text)))

    def document(self, rng: Random, most: int, room: int) -> Tree:
        """Draw a document of at most `most` people, half of them of so many, with questions, in `room` tokens."""
        people, limit = rng.choice((most, rng.randint(1, most))), min(MOST_DOCUMENT, 2 * room // 3)
        while True:
            facts, text = told(rng, people, self._words, self._given)
            if (size := len(self.encode(text))) <= limit or people == 1:
                break
            people = max(1, people * limit // size)
        prompts = []
        for question, answer, hint in asked(rng, facts):
            plain = in_prompt(question, text)
            said = _said(PROMPTS.answer(question, text, 1, None, hint)) if hint else [_user(plain)]
            prompts.append((self.chat(*said), answer))
        return self._tree(prompts, text, room)

    def questions(self, rng: Random, room: int) -> Tree:
        """Draw prompts of one kind that ask for questions, as a job has them, with the questions."""
        kind, prompts = rng.choice(KINDS), list[tuple[str, str]]()
        while len(prompts) < 8:
            facts, text = told(rng, rng.randint(1, 3), self._words)
            by_sentence = {each.sentence: each for own in facts for each in own}
            for attempt in range(8):
                said = _said(PROMPTS.question(text, attempt, rng.randrange(1 << 30), 1.0, None))
                sentence = said[-1]["content"].split("\nSentence: ")[1].split("\n")[0]
                each = by_sentence.get(sentence)
                if each is not None and said[-1]["content"].endswith(kind.instruction):
                    forms = (each.relation.questions[0], each.relation.reverse, each.relation.questions[1], EVERYTHING)
                    prompts.append((self.chat(*said), each.worded(forms[KINDS.index(kind)])))
        return self._tree(prompts, kind.examples[-1][2], room)

    def _tree(self, prompts: Sequence[tuple[str, str]], last: str, room: int) -> Tree:
        """Make a tree of prompts that are equal up to the text `last`, and of their answers."""
        at = prompts[0][0].index(last) + len(last)
        prefix, branches = self.encode(prompts[0][0][:at]), list[tuple[list[int], list[int]]]()
        room -= len(prefix)
        for prompt, answer in prompts:
            branch = self.encode(prompt[at:]), [*self.encode(answer), self._end]
            room -= len(branch[0]) + len(branch[1])
            if room < 0:
                break
            branches.append(branch)
        return Tree(prefix, branches)

    def rows(self, seed: int, count: int, length: int, most: int) -> Rows:
        """Make `count` rows of `length` tokens; documents have at most `most` people. The same seed, the same rows."""
        rng = Random(seed)
        return self.packed([list(self._drawn(rng, length, most)) for _ in range(count)], length)

    def _drawn(self, rng: Random, room: int, most: int) -> Iterator[Tree]:
        while room >= LEAST_TREE:
            tree = self.questions(rng, room) if rng.random() < 0.15 else self.document(rng, most, room)
            if not tree.branches:
                return
            yield tree
            room -= len(tree.prefix) + sum(len(prompt) + len(answer) for prompt, answer in tree.branches)

    def packed(self, rows: Sequence[Sequence[Tree]], length: int) -> Rows:
        """Return rows of these trees, each padded to `length`."""
        shape = len(rows), length
        made = Rows(
            ids=torch.full(shape, self._end),
            positions=torch.zeros(shape, dtype=torch.long),
            tree=torch.full(shape, -1),
            branch=torch.zeros(shape, dtype=torch.long),
        )
        for row, trees in enumerate(rows):
            at = 0
            for number, tree in enumerate(trees):
                at = _put(made, row, at, number, tree)
        return made

    def copies(self, seed: int, count: int, length: int) -> Rows:
        """Make `count` rows of random tokens that are to be repeated. The same seed, the same rows."""
        rng, rows = Random(seed), list[list[Tree]]()
        for _ in range(count):
            trees, room = list[Tree](), length
            while room >= 2 * LONGEST_COPY:
                ids = rng.choices(self._plain, k=rng.randint(8, LONGEST_COPY))
                trees.append(Tree(ids, [(ids[:1], ids[1:])]))
                room -= 2 * len(ids)
            rows.append(trees)
        return self.packed(rows, length)

    def bare(self, seed: int, count: int) -> list[list[int]]:
        """Make prompts of questions without a document."""
        rng = Random(seed)
        facts = (rng.choice(asked(rng, told(rng, 1, self._words)[0])) for _ in range(count))
        return [self.ask(question) for question, _, _ in facts]


def _put(rows: Rows, row: int, at: int, index: int, tree: Tree) -> int:
    """Write a tree at a place of a row; return the place behind it."""
    none: list[int] = []
    parts = [(0, tree.prefix, 0, none)]
    parts += [(number, prompt, len(tree.prefix), answer) for number, (prompt, answer) in enumerate(tree.branches, 1)]
    for branch, prompt, first, answer in parts:
        ids = [*prompt, *answer]
        own = slice(at, at + len(ids))
        rows.ids[row, own] = torch.tensor(ids)
        rows.positions[row, own] = torch.arange(first, first + len(ids))
        rows.tree[row, own], rows.branch[row, own] = index, branch
        begin = row * rows.ids.shape[1] + at + len(prompt) - 1
        rows.at += range(begin, begin + len(answer))
        rows.labels += answer
        at += len(ids)
    return at


class Batches(IterableDataset[Rows]):
    """Rows without end, for the workers of a `DataLoader`. The first batches are copies, the next small documents."""

    def __init__(self, reading: Reading, first: int, count: int, length: int, most: int) -> None:
        """`first`: seed; `count`, `length`: of `Reading.rows`; `most`: people of a document, once `RAMP` of them had
        some."""
        self._reading, self._first, self._size, self._most = reading, first, (count, length), most

    def __iter__(self) -> Iterator[Rows]:
        worker = get_worker_info()
        begin, by = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(begin, 1 << 30, by):
            if number < COPIES:
                yield self._reading.copies(self._first + number, *self._size)
                continue
            most = max(1, min(self._most, 2 + self._most * (number - COPIES) // RAMP))
            yield self._reading.rows(self._first + number, *self._size, most)


def _said(request: GenerateRequest) -> list[dict[str, str]]:
    assert request.messages is not None
    return [{"role": each.role, "content": str(each.content)} for each in request.messages]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
