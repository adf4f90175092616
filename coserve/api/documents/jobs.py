"""The phases of documents' jobs before and after training: questions and answers, and the evaluation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import msgspec

from coserve.api.documents.asking import Asker
from coserve.api.documents.evaluation import Evaluation
from coserve.api.documents.teaching import Lessons, Teaching
from coserve.api.generation.async_tokenizer import AsyncTokenizer
from coserve.api.jobs.recorder import JobRecorder
from coserve.api.jobs.sampling import act_as_owner
from coserve.api.node import Node
from coserve.core.cancellation import cancel_all
from coserve.core.errors import (
    CoserveError,
    EmptyCorpus,
    EngineUnavailable,
    JobNotFound,
    NotLearned,
    WrongJobState,
    failure_text,
)
from coserve.core.link.jobs import CancelJob, JobNote, JobSnapshot
from coserve.core.schemas.documents import DocumentEvaluation, DocumentJob, DocumentSettings
from coserve.core.training.jobs import JobState
from coserve.data.corpus.limits import longest_row
from coserve.data.corpus.tokenized import Corpus
from coserve.data.documents.encoder import encoded_tokens, prefix_tokens
from coserve.data.documents.lessons import Lesson, held_out, least_questions, lesson_corpus
from coserve.data.documents.pending import read_chunks
from coserve.data.documents.reading import Chunks
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry

log = logging.getLogger(__name__)

NO_RIVAL = (
    "compared with the base alone, as there is no adapter of another document yet: a part of the gain may be the form "
    "of the answers"
)

Prepared = Callable[[JobRecord, Corpus, DocumentJob], Awaitable[None]]


class DocumentJobs:
    """One task for each job whose questions and answers are being made; at most `max_active_jobs` at a time, in the
    order of `begin`. `prepared` is called with the job and the corpus to train on."""

    def __init__(self, node: Node, texts: AsyncTokenizer, asker: Asker, recorder: JobRecorder) -> None:
        self._config, self._folder, self._registry, self._engine = node.config, node.folder, node.registry, node.engine
        self._tokenizer, self._texts, self._asker, self._recorder = node.tokenizer, texts, asker, recorder
        self._places = asyncio.Semaphore(self._config.max_active_jobs)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.prepared: Prepared

    def begin(self, id: str) -> None:
        """Prepare a queued job in the background, after what is left of an earlier attempt has ended."""
        earlier = self._tasks.get(id)
        if earlier is not None:
            earlier.cancel()
        task = self._tasks[id] = asyncio.create_task(self._prepare(id, earlier))
        task.add_done_callback(lambda ended: self._tasks.pop(id) if self._tasks.get(id) is ended else None)

    def stop(self, id: str) -> None:
        """Stop preparing a job, if it is being prepared. Finished items stay."""
        if (task := self._tasks.get(id)) is not None:
            task.cancel()

    @property
    def preparing(self) -> int:
        """Number of jobs that are being prepared, or wait for a place."""
        return len(self._tasks)

    async def close(self) -> None:
        await cancel_all(self._tasks.values())

    async def _prepare(self, id: str, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        async with self._places:
            try:
                await self._recorder.retries.run(f"document of job {id}", lambda: self._try_to_prepare(id))
            except (EngineUnavailable, JobNotFound, WrongJobState) as error:  # the next engine does it, or it is gone
                log.info("job %s: is not prepared now: %s", id, error)
            except Exception as error:  # any kind: it fails this job alone
                if not isinstance(error, CoserveError):
                    log.error("job %s: internal error", id, exc_info=error)
                with suppress(JobNotFound, WrongJobState):  # it has ended otherwise
                    failure = failure_text(error)
                    await self._recorder.retries.run(f"job {id}", lambda: self._recorder.fail(id, *failure))

    async def _try_to_prepare(self, id: str) -> None:
        await act_as_owner(self._registry, id)
        record = await self._registry(lambda registry: registry.job(id))
        if record.state is JobState.QUEUED:
            record = await self._recorder.change(
                id, lambda registry: registry.set_state(id, JobState.RUNNING, message="job running: asks and answers")
            )
        document = record.document
        if record.state is not JobState.RUNNING or record.prepared or document is None:
            return
        chunks = await asyncio.to_thread(read_chunks, self._folder.document(id))
        job, lessons = await self._lessons(record, document, chunks)
        corpus, texts = await asyncio.to_thread(self._corpus, record, document.settings, chunks, lessons)
        if corpus.rows_cut:
            why = f"{corpus.rows_cut} questions and replayed texts are longer than max_length, the base's context or "
            why += "micro_batch_tokens: they lose the end of their answer, or are left out if there is no room for one"
            self._recorder.deliver(JobNote(id=id, message=why, kept=True))
        if job.settings.recipe == "encoder":
            record = msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, first_rows=texts))
        await self.prepared(record, corpus, job)

    async def _lessons(self, record: JobRecord, document: DocumentJob, chunks: Chunks) -> tuple[DocumentJob, Lessons]:
        await self._texts.read_template()
        id, seed = record.spec.id, record.spec.training.seed
        show = partial(self._show, id)
        teaching = Teaching(document, chunks, seed, self._folder.job(id), self._tokenizer, self._asker, show)
        return await teaching.run()

    def _corpus(
        self, record: JobRecord, settings: DocumentSettings, chunks: Chunks, lessons: Lessons
    ) -> tuple[Corpus, int]:
        """Return what `lesson_corpus` does. Raises `EmptyCorpus`."""
        spec = record.spec
        context, limit = self._engine.spec.context - prefix_tokens(spec), self._config.micro_batch_tokens
        longest = longest_row(spec.training, context, limit - encoded_tokens(spec))
        if len(lessons.taught) < (least := least_questions(settings)):
            found, way_out = f"the generator found {len(lessons.taught)} answered questions", "give questions, or "
            way_out += "a longer document" if settings.generator == "none" else 'set generator to "none"'
            if given := len(settings.questions):  # an earlier version accepted fewer
                found = f"{len(lessons.taught)} of the {given} questions given have an answer"
                way_out = "give more" + (' (2 with publish "always")' if least > 2 else "")
            raise EmptyCorpus(f"{found}: expected {least} at least, half of them to evaluate; {way_out}")
        learned, _ = _split(lessons, settings, spec.training.seed)
        texts = [self._tokenizer.encode(text) for text in chunks.texts]
        return lesson_corpus([*learned, *lessons.replayed], texts, settings, longest)

    async def _show(self, id: str, job: DocumentJob, message: str) -> None:
        await self._recorder.change(id, lambda registry: registry.record(id, "document", message, document=job))

    # ---- evaluation

    async def evaluate(self, record: JobRecord, snapshot: JobSnapshot) -> bool:
        """Evaluate a document's trained adapter, and record the result. Returns False if the engine ends first. An
        adapter that has learned nothing, or cannot be evaluated, is not published, unless the request says so: its job
        fails."""
        id, document = record.spec.id, record.document
        if document is None:
            return True
        found = document.evaluation
        if found is None:
            evaluate = partial(self._evaluation, record, document, snapshot)
            try:
                found = await self._recorder.retries.run(f"evaluation of job {id}", evaluate)
            except EngineUnavailable:
                return False
            except CoserveError as error:
                return await self._unproved(id, document, f"the adapter cannot be evaluated: {error}")
            document = msgspec.structs.replace(document, phase="done", done=0, total=0, evaluation=found)
            await self._show(id, document, _summary(found))
        if found.learned:
            if found.other is None:
                self._recorder.deliver(JobNote(id=id, message=NO_RIVAL, kept=True))
            return True
        rivals = "the base without the document"
        rivals += f" and than {found.other_adapter} of another document" if found.other is not None else ""
        why = f"{found.questions} held-out questions do not show, with 95% confidence, that the adapter is better than"
        why += f" {rivals} ({_losses(found)})"
        return await self._unproved(id, document, why)

    async def _unproved(self, id: str, document: DocumentJob, why: str) -> bool:
        """End the job without an adapter, or let it publish with a note. Returns whether it goes on."""
        if document.settings.publish == "always":
            self._recorder.deliver(JobNote(id=id, message=why, kept=True))
            return True
        await self._recorder.fail(id, NotLearned.code, f'{why}: it is not published (publish "always" does)')
        self._engine.offer(CancelJob(id=id))
        return False

    async def _evaluation(self, record: JobRecord, document: DocumentJob, snapshot: JobSnapshot) -> DocumentEvaluation:
        chunks = await asyncio.to_thread(read_chunks, self._folder.document(record.spec.id))
        _, lessons = await self._lessons(record, document, chunks)
        _, held = _split(lessons, document.settings, record.spec.training.seed)

        async def show(done: int, total: int) -> None:
            job = msgspec.structs.replace(document, phase="evaluation", done=done, total=total)
            await self._show(record.spec.id, job, f"evaluation: {done} of {total}")

        evaluation = Evaluation(self._folder.job(record.spec.id), self._asker, show)
        return await evaluation.run(
            held,
            lessons.reserved,
            snapshot.ref,
            snapshot.step,
            lambda: self._registry(partial(_other, record=record, digest=document.digest)),
            matches=document.settings.generator != "none",
        )


def _split(lessons: Lessons, settings: DocumentSettings, seed: int) -> tuple[list[Lesson], list[Lesson]]:
    """Return the lessons to train on, and those to evaluate. The recipe `lm` trains on none and evaluates all."""
    return ([], lessons.taught) if settings.recipe == "lm" else held_out(lessons.taught, settings.holdout, seed)


def _other(registry: Registry, *, record: JobRecord, digest: str) -> str | None:
    """Return the latest adapter of another document, on the same base. Adapters of the same document, which has this
    digest, are left out: they may know the answers."""
    published = set(registry.adapter_refs())
    for job in registry.jobs(limit=-1, states=(JobState.SUCCEEDED,)):
        same = job.base_fingerprint == record.base_fingerprint and job.spec.adapter != record.spec.adapter
        other = job.document is not None and job.document.digest != digest
        if other and same and job.result in published:
            return str(job.result)
    return None


def _summary(found: DocumentEvaluation) -> str:
    recovered = "" if found.recovered is None else f", {found.recovered:.0%} of the context's gain"
    return f"{_losses(found)}{recovered}; retention {found.retention:+.1%}"


def _losses(found: DocumentEvaluation) -> str:
    return f"nats a token: {', '.join(found.losses)}"
