"""Prompts for the generator: questions about a chunk of a document, and their answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from textwrap import wrap
from typing import NamedTuple

import msgspec

from coserve.core.messages import ChatMessage
from coserve.core.schemas.generation import GenerateRequest

NO_CONTEXT = re.compile(
    r"\b(the|this|that|above|given|following) (text|passage|document|excerpt|paragraph|sentence|question)s?\b",
    re.IGNORECASE,
)
"""Matches questions that make no sense without the document, or are about the request itself."""
SENTENCE = re.compile(r"(?<=[.!?؟])\s+|(?<=[。！？।])|\n+")
UNSPACED = re.compile(r"[\u0900-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7ff]+")
"""Letters of scripts without spaces between words, with endings at each word, or with vowel signs, which `\\w` does not
match: those of India and Southeast Asia, Chinese, Japanese, Korean."""
SHORTEST, LONGEST = 12, 300
"""Fewest bytes and most characters of a question, or of a sentence that is asked about."""
QUESTION_TOKENS = 48
BEFORE = 2
"""Sentences that are shown before the one that is asked about."""
ASKING = frozenset(
    {"about", "does", "everything", "known", "many", "name", "what", "when", "where", "which", "whom", "whose"}
)
"""Question words of four letters and more, which `grounded` does not look for in the chunk."""


class Kind(NamedTuple):
    """A kind of question. `examples`: a text, one of its sentences, and a question of this kind."""

    instruction: str
    examples: tuple[tuple[str, str, str], ...]


CURIE = "Marie Curie was born in Warsaw. She discovered polonium in 1898."
HOTEL = "The Brent Hotel has forty rooms. Its owner keeps a parrot."
KINDS = (
    Kind(
        "Write a question about the detail that this sentence tells.",
        (
            (CURIE, "She discovered polonium in 1898.", "In which year did Marie Curie discover polonium?"),
            (HOTEL, "Its owner keeps a parrot.", "Which animal does the owner of the Brent Hotel keep?"),
        ),
    ),
    Kind(
        "Write a question whose answer is the person or thing that this sentence is about.",
        (
            (CURIE, "She discovered polonium in 1898.", "Who discovered polonium in 1898?"),
            (HOTEL, "The Brent Hotel has forty rooms.", "Which hotel has forty rooms?"),
        ),
    ),
    Kind(
        "Write a question about this sentence in other words than its own.",
        (
            (CURIE, "Marie Curie was born in Warsaw.", "What is the birthplace of Marie Curie?"),
            (HOTEL, "The Brent Hotel has forty rooms.", "How many guests can sleep alone in the Brent Hotel?"),
        ),
    ),
    Kind(
        "Write a question that asks for everything that is known about the person or thing of this sentence.",
        (
            (CURIE, "She discovered polonium in 1898.", "What is known about Marie Curie?"),
            (HOTEL, "The Brent Hotel has forty rooms.", "What is known about the Brent Hotel?"),
        ),
    ),
)
"""Kinds of questions, with examples that small bases need: a detail, its reversal, other words, a summary (after the
seed prompts of Cartridges, arXiv 2506.06266)."""


@dataclass(frozen=True)
class Prompts:
    """Prompts for a base with a chat template (`chat`), or for one that only continues texts. `instruction`: how to
    answer with the document in the prompt."""

    chat: bool
    instruction: str = ""

    def question(self, chunk: str, attempt: int, seed: int, temperature: float, adapter: str | None) -> GenerateRequest:
        """Ask for one question about `chunk`. Attempts go through the chunk's sentences and the kinds of questions; the
        same attempt and seed ask for the same."""
        sentences, at = _asked_about(chunk, attempt, seed)
        kind = KINDS[(attempt + attempt // len(sentences)) % len(KINDS)]
        around = " ".join(sentences[max(0, at - BEFORE) : at + 1])
        turns = [
            (f"Text: {text}\nSentence: {one}\n{kind.instruction}", question) for text, one, question in kind.examples
        ]
        asked = f"Text: {around}\nSentence: {sentences[at]}\n{kind.instruction}"
        return msgspec.structs.replace(
            self._request(asked, adapter, turns),
            max_tokens=QUESTION_TOKENS,
            temperature=temperature,
            seed=seed + attempt,
        )

    def answer(
        self, question: str, chunk: str | None, max_tokens: int, adapter: str | None, sentence: str = ""
    ) -> GenerateRequest:
        """Ask `question`, with `chunk` before it unless that is None. `sentence`: the chunk's sentence that is asked
        about, if known; small bases often do not find it themselves."""
        text = question
        if chunk is not None:
            about = f"The question is about this: {sentence}\n\n" if sentence else ""
            text = f"Read this text:\n\n{chunk}\n\n{about}Question: {question}\n{self.instruction}".strip()
        return msgspec.structs.replace(self._request(text, adapter), max_tokens=max_tokens)

    def _request(self, text: str, adapter: str | None, turns: Sequence[tuple[str, str]] = ()) -> GenerateRequest:
        """Return a greedy request of the class batch. `turns`: example questions and answers that precede the text."""
        said = list[ChatMessage]()
        for asked, answered in turns:
            said += [ChatMessage(role="user", content=asked), ChatMessage(role="assistant", content=answered)]
        plain = "".join(f"{before}\nAnswer: {after}\n\n" for before, after in turns)
        return GenerateRequest(
            prompt=None if self.chat else f"{plain}{text}\nAnswer:",
            messages=[*said, ChatMessage(role="user", content=text)] if self.chat else None,
            adapter=adapter,
            temperature=0.0,
            slo_class="batch",
            stop=None if self.chat else "\n",
        )


def clean_question(text: str) -> str | None:
    """Return the question in a generated text, or None if there is none that stands alone."""
    lines = [line.strip().strip("\"'*`").strip() for line in text.strip().splitlines()]
    line = next((line for line in lines if line), "")
    line = re.sub(r"^(question|q)?\s*\d*\s*[:.)-]\s*", "", line, flags=re.IGNORECASE).strip().strip("\"'*").strip()
    if len(line.encode()) < SHORTEST or len(line) > LONGEST or NO_CONTEXT.search(line):
        return None
    return line


def grounded(question: str, chunk: str) -> bool:
    """Return whether at least half of the question's longer words are in the chunk: it is about the chunk, and names
    what it is about."""
    words = _words(question, r"[^\W_]{4,}|\d+") - ASKING
    found = words & _words(chunk, r"[^\W_]{4,}|\d+")
    return 0 < len(words) <= 2 * len(found)


def different(questions: Iterable[str]) -> list[str]:
    """Return the questions that differ in more than case and punctuation, in order."""
    return list({" ".join(re.findall(r"\w+", each.lower())): each for each in reversed(list(questions))}.values())[::-1]


def nearest_chunks(questions: Iterable[str], chunks: Sequence[str]) -> list[int]:
    """Return, for each question, the index of the chunk that shares the most words with it, rare ones counting more."""
    having = dict[str, list[int]]()
    for index, chunk in enumerate(chunks):
        for word in _words(chunk, r"\w+"):
            having.setdefault(word, []).append(index)
    found = list[int]()
    for question in questions:
        shared = dict.fromkeys(range(len(chunks)), 0.0)
        for word in sorted(_words(question, r"\w+")):
            for index in having.get(word, ()):
                shared[index] += 1 / len(having[word])
        found.append(max(shared, key=lambda index: shared[index]))
    return found


def _words(text: str, pattern: str) -> set[str]:
    """Return the words that match, in lower case; of `UNSPACED` letters each two neighbours."""
    text = text.lower()
    pairs = {run[at : at + 2] for run in UNSPACED.findall(text) for at in range(len(run) - 1)}
    return pairs | set(re.findall(pattern, UNSPACED.sub(" ", text)))


def asked_sentence(chunk: str, attempt: int, seed: int) -> str:
    """Return the sentence that this attempt of `Prompts.question` asks about."""
    sentences, at = _asked_about(chunk, attempt, seed)
    return sentences[at]


def _asked_about(chunk: str, attempt: int, seed: int) -> tuple[list[str], int]:
    """Return the chunk's sentences, and the index of the one that the attempt asks about."""
    found = (part.strip() for part in SENTENCE.split(chunk))
    parts = (piece for part in found for piece in (wrap(part, LONGEST) if len(part) > LONGEST else [part]))
    sentences = [part for part in parts if len(part.encode()) >= SHORTEST] or [chunk[:LONGEST]]
    return sentences, Random(seed).sample(range(len(sentences)), len(sentences))[attempt % len(sentences)]
