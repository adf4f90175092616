"""Phases of a document's job before its training: questions about the chunks, then answers with the chunk in the
prompt. Each question and answer is written to disk as soon as it is generated, so that a job that resumes generates
none twice."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from coserve.api.documents.asking import AT_ONCE, Asked, Asker
from coserve.core.cancellation import task_group
from coserve.core.errors import PromptTooLong
from coserve.core.schemas.documents import DocumentJob, DocumentSettings, Phase
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.types import Wire
from coserve.data.documents.lessons import LEAST_HELD_OUT, MOST_HELD_OUT, TOP_K, Lesson, packed_top
from coserve.data.documents.prompts import Prompts, asked_sentence, clean_question, different, grounded, nearest_chunks
from coserve.data.documents.reading import Chunks
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.failpoints import failpoint
from coserve.state.item_log import ItemLog
from coserve.workloads.bundled import bundled_prompts

ROUNDS = 4
"""Attempts to get the questions that a chunk still lacks."""
RESERVED = 4
"""Every fourth general prompt is held out from training, to measure retention."""
REPLAY_TOKENS = 64
SHOWN, MOST_UNSHOWN = 8, 1000
"""Progress is recorded after each such part of a phase, and after this many items."""
PIECES = 8
"""With generator `none`, a chunk is split into this many pieces; all but the first are learned as continuations."""

Show = Callable[[DocumentJob, str], Awaitable[None]]
"""Records the job's progress, with a message."""
T = TypeVar("T", "Question", Lesson)
Work = Mapping[str, Callable[[], Awaitable[T]]]
"""Coroutine functions that make the items of a phase, by the key of the item."""


class Question(Wire, frozen=True):
    """An attempt to generate a question about a chunk. `attempt`: its number, negative for the user's own questions.
    `text`: empty if the attempt gave no question."""

    chunk: int
    attempt: int
    text: str
    generated: int = 0
    """Tokens that the attempt took."""
    grounded: bool = True
    """Whether it has the chunk's words."""
    answer: str | None = None

    @property
    def key(self) -> str:
        return f"{self.chunk}/{self.attempt}"


@dataclass(frozen=True)
class Lessons:
    """The results. `taught`: lessons about the document; `replayed`: answers of the base to general prompts, trained on
    against forgetting; `reserved`: more of these, held out (see `RESERVED`)."""

    taught: list[Lesson]
    replayed: list[Lesson]
    reserved: list[Lesson]


class Teaching:
    """The phases of one job. `folder`: the job's folder; `show` is called with its progress from time to time."""

    def __init__(
        self, job: DocumentJob, chunks: Chunks, seed: int, folder: Path, tokenizer: Tokenizer, asker: Asker, show: Show
    ) -> None:
        self._job, self._chunks, self._seed, self._asker, self._show = job, chunks.texts, seed, asker, show
        self._settings, self._tokenizer, self._generated = job.settings, tokenizer, 0
        self._prompts = Prompts(tokenizer.chat_template is not None, self._settings.instruction)
        self._adapter = job.settings.generator_adapter
        self._questions = ItemLog(folder / "questions.jsonl", Question)
        self._lessons = ItemLog(folder / "lessons.jsonl", Lesson)

    async def run(self) -> tuple[DocumentJob, Lessons]:
        """Run the phases, except for the items that are in the folder already."""
        asked = {each.key: each for each in await asyncio.to_thread(self._questions.read)}
        answered = {each.key: each for each in await asyncio.to_thread(self._lessons.read)}
        self._generated = sum([each.generated for each in asked.values()])
        self._generated += sum([each.generated for each in answered.values()])
        own, questions = self._settings.questions, list[Question]()
        if own:
            texts = [each.question for each in own]
            places = await asyncio.to_thread(nearest_chunks, texts, self._chunks)
            questions = [
                Question(chunk, -1 - index, each.question, answer=each.answer)
                for index, (each, chunk) in enumerate(zip(own, places, strict=True))
            ]
        elif self._settings.generator != "none":
            questions = await self._ask_questions(asked)
        lessons = await self._answer(questions, answered)
        return self._job, lessons

    # ---- questions

    async def _ask_questions(self, found: dict[str, Question]) -> list[Question]:
        """Ask until each chunk has its quota of different questions, or all attempts are made. `found`: the attempts
        made before, by key."""
        chunks = len(self._chunks)
        quota = question_quota(self._settings, chunks)

        def different_ones(made: Sequence[Question]) -> int:
            return sum(min(quota, len(texts)) for texts in _texts([*found.values(), *made], chunks))

        for round in range(ROUNDS):
            first = round * quota
            # A round that is resumed asks for as many as it did, whatever it has found already.
            earlier = [each for each in found.values() if each.attempt < first]
            lacking = [quota - len(texts) for texts in await asyncio.to_thread(_texts, earlier, chunks)]
            wanted = [(chunk, first + index) for chunk, count in enumerate(lacking) for index in range(count)]
            work = {f"{c}/{a}": partial(self._question, c, a) for c, a in wanted if f"{c}/{a}" not in found}
            found |= await self._all("questions", work, self._questions, quota * chunks, different_ones)
        texts = await asyncio.to_thread(_texts, found.values(), chunks, every=True)
        taken = set(await asyncio.to_thread(different, [text for own in texts for text in own[:quota]]))
        kept = list[Question]()
        for each in sorted(found.values(), key=lambda each: (each.chunk, each.attempt)):
            if each.text in taken:
                taken.remove(each.text)
                kept.append(each)
        return kept

    async def _question(self, chunk: int, attempt: int) -> Question:
        text, seed, temperature = self._chunks[chunk], self._chunk_seed(chunk), self._settings.temperature
        asked = await self._fitting(self._prompts.question(text, attempt, seed, temperature, self._adapter))
        failpoint("document.questions")
        question = clean_question(asked.text) or ""
        return Question(chunk, attempt, question, len(asked.tokens), grounded=grounded(question, text))

    async def _fitting(self, request: GenerateRequest) -> Asked:
        """Ask; a prompt that does not fit into the context has an empty answer: its sentence has too many tokens."""
        try:
            return await self._asker.ask(request)
        except PromptTooLong:
            return Asked()

    def _chunk_seed(self, chunk: int) -> int:
        return self._seed + 1_000_003 * chunk

    # ---- answers

    async def _answer(self, questions: list[Question], found: dict[str, Lesson]) -> Lessons:
        """Make the lessons that are not in `found`, by key."""
        work: dict[str, Callable[[], Awaitable[Lesson]]] = {each.key: partial(self._lesson, each) for each in questions}
        if self._settings.generator == "none":
            pieces = await asyncio.to_thread(lambda: list(self._pieces()))
            work = {key: partial(self._continued, key, *piece) for key, piece in pieces}
        own = set(work)
        prompts = bundled_prompts()
        learned = [prompt for index, prompt in enumerate(prompts) if index % RESERVED]
        for index in range(math.ceil(self._settings.replay * len(own))):
            key, prompt = f"replay/{index}", learned[index % len(learned)]
            work[key] = partial(self._replayed, key, prompt, index)
        for index, prompt in enumerate(prompts[::RESERVED]):
            work[f"reserved/{index}"] = partial(self._replayed, f"reserved/{index}", prompt, index)
        self._job = msgspec.structs.replace(self._job, questions=len(own), generated_tokens=self._generated)
        left = {key: make for key, make in work.items() if key not in found}
        had = len(work) - len(left)
        found |= await self._all("answers", left, self._lessons, len(work), lambda made: had + len(made))
        usable = [found[key] for key in sorted(found) if found[key].answer]
        return Lessons(
            [each for each in usable if each.key in own],
            [each for each in usable if each.key.startswith("replay/")],
            [each for each in usable if each.key.startswith("reserved/")],
        )

    async def _lesson(self, question: Question) -> Lesson:
        """Return a question with its answer: the user's, or else the generator's, whose prompt has the chunk and the
        sentence that the question is about."""
        adapter, most, chunk = self._adapter, self._settings.answer_tokens, self._chunks[question.chunk]
        own = question.attempt < 0
        sentence = "" if own else asked_sentence(chunk, question.attempt, self._chunk_seed(question.chunk))
        asked_with = self._prompts.answer(question.text, chunk, most, adapter, sentence)
        student = await self._asker.prompt_ids(self._prompts.answer(question.text, None, most, None))
        if question.answer is None:
            scored = msgspec.structs.replace(asked_with, logprobs=TOP_K)
            found = await (self._asker.ask(scored) if own else self._fitting(scored))
            context, answer, text, scores = found.prompt, found.tokens, found.text, packed_top(found.logprobs)
        else:
            ends = (self._tokenizer.end_of_turn_id, *self._tokenizer.eos_token_ids)
            text, end = question.answer, [id for id in ends if id is not None][:1]
            context = await self._asker.prompt_ids(asked_with)
            answer = self._tokenizer.encode_continuation(text if self._prompts.chat else f" {text}") + end
            scores = b"", b""  # learned as it is given: the generator may find it unlikely
        failpoint("document.answers")
        return Lesson(question.key, student, answer, *scores, context, question.text, text, question.chunk)

    def _pieces(self) -> Iterable[tuple[str, tuple[int, list[int], int, int]]]:
        """Yield the pieces that generator `none` continues: key, chunk, the chunk's tokens, and the piece's bounds."""
        for chunk, text in enumerate(self._chunks):
            ids = self._tokenizer.encode(text)
            size = max(8, math.ceil(len(ids) / PIECES))
            for start in range(size, len(ids) - 1, size):
                yield f"{chunk}/{start}", (chunk, ids, start, min(len(ids), start + size))

    async def _continued(self, key: str, chunk: int, ids: list[int], start: int, stop: int) -> Lesson:
        context, answer, seen = ids[:start], ids[start:stop], max(1, (stop - start) // 4)
        scores = packed_top(await self._asker.score(context, answer, top=TOP_K))
        return Lesson(key, context[-seen:], answer, *scores, context, chunk=chunk)

    async def _replayed(self, key: str, prompt: str, index: int) -> Lesson:
        """Return a general prompt with an answer of the base. It is sampled at temperature 1, so that its likelihood
        shows what the adapter has changed."""
        request = self._prompts.answer(prompt, None, REPLAY_TOKENS, None)
        sampled = msgspec.structs.replace(request, temperature=1.0, seed=self._seed + index, logprobs=TOP_K)
        found = await self._asker.ask(sampled)
        return Lesson(key, found.prompt, found.tokens, *packed_top(found.logprobs), [], prompt, found.text)

    # ---- both

    async def _all(
        self, phase: Phase, work: Work[T], log: ItemLog[T], total: int, count: Callable[[Sequence[T]], int]
    ) -> dict[str, T]:
        """Make items of a phase, and append each to the log as it comes. `count`: how much of the phase's `total` is
        done with the items made here."""
        writing = asyncio.Lock()
        found: dict[str, T] = {}
        if not work:
            return found
        await self._progress(phase, await asyncio.to_thread(count, ()), total)
        left, part = iter(work.items()), max(1, min(MOST_UNSHOWN, total // SHOWN))

        async def some() -> None:
            for key, make in left:
                made = await make()
                async with writing:
                    await asyncio.to_thread(log.append, made)
                    found[key] = made
                    self._generated += made.generated
                    if len(found) % part == 0 or len(found) == len(work):
                        await self._progress(phase, await asyncio.to_thread(count, tuple(found.values())), total)

        async with task_group() as group:
            for _ in range(min(AT_ONCE, len(work))):
                group.create_task(some())
        return found

    async def _progress(self, phase: Phase, done: int, total: int) -> None:
        before, self._job = (
            self._job,
            msgspec.structs.replace(self._job, phase=phase, done=done, total=total, generated_tokens=self._generated),
        )
        if self._job != before:
            await self._show(self._job, f"{phase}: {done} of {total}")


def question_quota(settings: DocumentSettings, chunks: int) -> int:
    """Return the number of questions per chunk. With the recipe `lm` they are for the evaluation only."""
    if settings.recipe != "lm":
        return settings.questions_per_chunk
    wanted = round(settings.holdout * settings.questions_per_chunk * chunks)
    return math.ceil(min(MOST_HELD_OUT, max(2 * LEAST_HELD_OUT, wanted)) / chunks)


def _texts(questions: Iterable[Question], chunks: int, *, every: bool = False) -> list[list[str]]:
    """Return, for each chunk, the distinct questions about it that are `grounded` in it; `every`: followed by the
    others."""
    found = [list[str]() for _ in range(chunks)]
    for each in sorted(questions, key=lambda each: (not each.grounded, each.attempt)):
        if each.text and (each.grounded or every):
            found[each.chunk].append(each.text)
    return [different(texts) for texts in found]
