"""The phases before training, with a generator that remembers what it is asked."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

from coserve.api.documents.asking import AT_ONCE, Asked
from coserve.api.documents.teaching import Teaching
from coserve.core.errors import PromptTooLong
from coserve.core.schemas.documents import DocumentJob, DocumentSettings
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.types import AdapterRef
from coserve.data.documents.reading import Chunks
from tests.support.api_server import tokenizer

CHUNKS = [" ".join(f"The {thing} was made in {year}." for year in range(1901, 1907)) for thing in ("bridge", "river")]


class Remembering:
    """Gives each question a number. `asked`, `shown`: the sentence that a question was to be about, and the one that
    was shown with it, by the question."""

    def __init__(self) -> None:
        self.asked, self.shown = dict[str, str](), dict[str, str]()

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        return [1]

    async def ask(self, request: GenerateRequest, snapshot: AdapterRef | None = None) -> Asked:
        text = str(request.messages[-1].content if request.messages else request.prompt)
        if about := re.findall(r"Sentence: ([^\n]+)", text):
            question = f"Which thing is number {len(self.asked)}?"
            self.asked[question] = about[-1]
            return Asked(text=question, tokens=[1])
        for sentence, question in re.findall(r"is about this: ([^\n]+)\n\nQuestion: ([^\n]+)", text):
            self.shown[question] = sentence
        return Asked(prompt=[1], text="an answer", tokens=[1])


class Counting(Remembering):
    """Counts requests in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    async def ask(self, request: GenerateRequest, snapshot: AdapterRef | None = None) -> Asked:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return await super().ask(request, snapshot)


class Narrow(Remembering):
    """Has no room for a prompt that asks for a question about 1903, or for an answer about 1905."""

    async def ask(self, request: GenerateRequest, snapshot: AdapterRef | None = None) -> Asked:
        text = str(request.messages[-1].content if request.messages else request.prompt)
        if re.search(r"Sentence: [^\n]+1903|is about this: [^\n]+1905", text):
            raise PromptTooLong("expected at most 63 tokens, got 90")
        return await super().ask(request, snapshot)


async def test_a_sentence_that_does_not_fit_into_the_context_is_left_out(tmp_path: Path) -> None:
    async def show(job: DocumentJob, message: str) -> None:
        pass

    job, asker = DocumentJob(settings=DocumentSettings(questions_per_chunk=6)), Narrow()
    teaching = Teaching(job, Chunks(CHUNKS, 32), 3, tmp_path, tokenizer(), asker, show)  # type: ignore[arg-type]
    _, lessons = await teaching.run()
    assert {asker.asked[lesson.question][-5:-1] for lesson in lessons.taught} == {"1901", "1902", "1904", "1906"}


async def test_a_large_document_makes_few_requests_at_a_time(tmp_path: Path) -> None:
    """Whatever the number of its questions, so that the event loop stays free."""

    async def show(job: DocumentJob, message: str) -> None:
        pass

    job, asker = DocumentJob(settings=DocumentSettings(questions_per_chunk=12)), Counting()
    teaching = Teaching(job, Chunks(CHUNKS * 8, 512), 3, tmp_path, tokenizer(), asker, show)  # type: ignore[arg-type]
    _, lessons = await teaching.run()
    assert len(lessons.taught) == 192
    assert asker.most == AT_ONCE


class Repeating(Remembering):
    """Asks questions in words of the text, the last of them again and again."""

    async def ask(self, request: GenerateRequest, snapshot: AdapterRef | None = None) -> Asked:
        found = await super().ask(request, snapshot)
        return replace(found, text=f"Was the bridge or river made in {min(len(self.asked), 75)}?")


async def test_progress_is_shown_by_share_and_not_for_each_attempt(tmp_path: Path) -> None:
    """Rounds of a few attempts follow the first one, for the questions that it gave twice."""

    async def show(job: DocumentJob, message: str) -> None:
        shown.append((job.phase, job.done, job.generated_tokens))

    shown = list[tuple[str, int, int]]()
    job, asker = DocumentJob(settings=DocumentSettings(questions_per_chunk=40, replay=0.5)), Repeating()
    teaching = Teaching(job, Chunks(CHUNKS, 32), 3, tmp_path, tokenizer(), asker, show)  # type: ignore[arg-type]
    await teaching.run()
    questions = [done for phase, done, _ in shown if phase == "questions"]
    assert questions[0] == 0 and questions[-1] == 75 and len(shown) == len(set(shown))
    assert len(asker.asked) > 80 and len(questions) <= 8 + 1 + 3, "eighths, the beginning, and further rounds"


class Seeded(Remembering):
    """Asks the same question again in half of the first six attempts, and none in the eighth."""

    async def ask(self, request: GenerateRequest, snapshot: AdapterRef | None = None) -> Asked:
        found, attempt = await super().ask(request, snapshot), (request.seed or 0) - 3
        made = attempt % 3 if attempt < 6 else attempt
        return replace(found, text="" if attempt == 7 else f"Was the bridge made in {1900 + made}?")


async def test_rounds_that_a_death_ended_ask_the_same(tmp_path: Path) -> None:
    async def show(job: DocumentJob, message: str) -> None:
        pass

    async def asked(folder: Path) -> set[str]:
        job = DocumentJob(settings=DocumentSettings(questions_per_chunk=6))
        teaching = Teaching(job, Chunks(CHUNKS[:1], 16), 3, folder, tokenizer(), Seeded(), show)  # type: ignore[arg-type]
        return {lesson.question for lesson in (await teaching.run())[1].taught}

    for name in ("whole", "dead"):
        (tmp_path / name).mkdir()
    whole = await asked(tmp_path / "whole")
    assert {question[-5:-1] for question in whole} == {"1900", "1901", "1902", "1906", "1908", "1912"}
    lines = (tmp_path / "whole" / "questions.jsonl").read_text().splitlines(keepends=True)
    left = [line for line in lines if "1908" not in line and "1912" not in line]
    (tmp_path / "dead" / "questions.jsonl").write_text("".join(left))
    assert await asked(tmp_path / "dead") == whole


async def test_answers_are_given_with_the_sentence_that_was_asked_about(tmp_path: Path) -> None:
    async def show(job: DocumentJob, message: str) -> None:
        shown.append((job.phase, job.done, job.total))

    shown = list[tuple[str, int, int]]()
    job, asker = DocumentJob(settings=DocumentSettings(questions_per_chunk=6, replay=0.5)), Remembering()
    teaching = Teaching(job, Chunks(CHUNKS, 32), 3, tmp_path, tokenizer(), asker, show)  # type: ignore[arg-type]
    last, lessons = await teaching.run()
    assert len(lessons.taught) == 12
    assert {(phase, total) for phase, _, total in shown} == {("questions", 12), ("answers", 26)}
    assert shown[-1] == ("answers", 26, 26) == (last.phase, last.done, last.total)
    again = Teaching(job, Chunks(CHUNKS, 32), 3, tmp_path, tokenizer(), asker, show)  # type: ignore[arg-type]
    tokens = len(asker.asked) + 26
    assert (last.questions, last.generated_tokens, (await again.run())[0].generated_tokens) == (12, tokens, tokens)
    assert all(done <= total for _, done, total in shown)
    assert set(asker.asked.values()) == {f"{part}." for chunk in CHUNKS for part in chunk.strip(".").split(". ")}
    assert asker.shown == {lesson.question: asker.asked[lesson.question] for lesson in lessons.taught}
