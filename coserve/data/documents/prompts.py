"""What the generator is asked: questions about a chunk of a document, and their answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from coserve.core.messages import ChatMessage
from coserve.core.schemas import GenerateRequest

KINDS = (
    "Ask a short question about one fact in it: a name, a number, a date or a place.",
    "Ask which person or thing it is that the passage describes so, giving the description and not the name.",
    "Ask a question whose answer joins two facts of it.",
    "Ask for a summary of what it says about one subject.",
    "Ask a practical question that somebody who needs this knowledge would have.",
)
"""Kinds of questions (structuring, reversal, joining, summary, use; after Cartridges' seed prompts)."""
RULES = (
    "Name what the question is about, so that it can be understood without the text. Write only the question, in one "
    "line."
)
NO_CONTEXT = re.compile(
    r"\b(the|this|that|above|given) (text|passage|document|excerpt|paragraph|sentence)\b", re.IGNORECASE
)
"""A question that cannot be asked without the document."""
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
SHORTEST, LONGEST = 12, 400
"""Characters of a question."""
QUESTION_TOKENS = 64


@dataclass(frozen=True)
class Prompts:
    """Prompts for a base with a chat template (`chat`), or for one that only continues texts."""

    chat: bool

    def question(self, chunk: str, attempt: int, seed: int, temperature: float, adapter: str | None) -> GenerateRequest:
        """Ask for one question about `chunk`. Attempts go through the chunk's sentences and the kinds of questions; the
        same attempt and seed ask for the same."""
        sentences = _sentences(chunk)
        order = Random(seed).sample(range(len(sentences)), len(sentences))
        about = sentences[order[attempt % len(order)]]
        kind = KINDS[(attempt + attempt // len(order)) % len(KINDS)]
        text = f'{chunk}\n\nHere is a passage of the text above: "{about}"\n{kind} {RULES}'
        request = self._request(text if self.chat else f"{chunk}\n\nA question about: {about}\nQuestion:", adapter)
        return msgspec.structs.replace(
            request, max_tokens=QUESTION_TOKENS, temperature=temperature, seed=seed + attempt
        )

    def answer(self, question: str, chunk: str | None, max_tokens: int, adapter: str | None) -> GenerateRequest:
        """Ask `question`, with `chunk` before it unless that is None."""
        before = "" if chunk is None else f"{chunk}\n\n"
        request = self._request(
            f"{before}{question}" if self.chat else f"{before}Question: {question}\nAnswer:", adapter
        )
        return msgspec.structs.replace(request, max_tokens=max_tokens)

    def _request(self, text: str, adapter: str | None) -> GenerateRequest:
        """Return a greedy request of the class batch."""
        return GenerateRequest(
            prompt=None if self.chat else text,
            messages=[ChatMessage(role="user", content=text)] if self.chat else None,
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
    if not SHORTEST <= len(line) <= LONGEST or NO_CONTEXT.search(line):
        return None
    return line


def different(questions: Iterable[str]) -> list[str]:
    """Return the questions that differ in more than case and punctuation, in order."""
    return list({" ".join(re.findall(r"\w+", each.lower())): each for each in reversed(list(questions))}.values())[::-1]


def nearest_chunk(question: str, chunks: Sequence[str]) -> int:
    """Return the index of the chunk that shares the most words with the question, rare ones counting more."""
    wanted = set(re.findall(r"\w+", question.lower()))
    found = [set(re.findall(r"\w+", chunk.lower())) & wanted for chunk in chunks]
    rarity = {word: 1 / sum(word in own for own in found) for own in found for word in own}
    return max(range(len(chunks)), key=lambda index: sum(rarity[word] for word in found[index]))


def _sentences(chunk: str) -> list[str]:
    found = [part.strip() for part in SENTENCE.split(chunk) if len(part.strip()) >= SHORTEST]
    return [part[:LONGEST] for part in found] or [chunk[:LONGEST]]
