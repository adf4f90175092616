"""Checks a fine-tuning request and tokenises its corpus."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from coserve.admission.ends import check_loss, with_end_names
from coserve.admission.memory import check_fits
from coserve.admission.optimizers import check_optimizer
from coserve.admission.ranks import check_ranks
from coserve.api.adapters.catalog import refuse_base_name
from coserve.api.adapters.inspection import Inspection, refuse_too_large
from coserve.api.adapters.lookup import find_adapter
from coserve.api.documents.submission import CheckedDocument, DocumentSubmission
from coserve.api.generation.async_tokenizer import AsyncTokenizer
from coserve.api.generation.prompts import check_generate, encode_prompt
from coserve.api.jobs.conflicts import last_job, refuse_conflict, serialised
from coserve.api.jobs.evaluation import JobTest, read_test
from coserve.api.jobs.notes import row_notes
from coserve.api.jobs.preparation import CorpusPreparation, Report, Show
from coserve.api.jobs.sampling import sample_request
from coserve.api.jobs.sources import Source, UploadedRows, corpus_source, local_rows, validation_source
from coserve.api.node import Node
from coserve.core.access.principal import principal
from coserve.core.cancellation import uncancelled_thread
from coserve.core.errors import CoserveError, InvalidRequest, RequestError
from coserve.core.names import split_ref
from coserve.core.schemas.jobs import MAX_EVAL_ROWS, FinetuneRequest, Preparing
from coserve.core.training.jobs import JobSpec, JobState, Teacher
from coserve.core.training.settings import KtoLoss, PairLoss, TrainingRequest, TrainingSettings
from coserve.core.types import AdapterRef, BaseSpec, LoraRequest, LoraSettings
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.columns import Columns, unused_notes
from coserve.data.corpus.conversion import MAX_UNPACKED, is_json_lines
from coserve.data.corpus.defaults import choose_training
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.limits import check_training, longest_row, micro_batch_limit
from coserve.data.corpus.rows import ChatRow, LabelledRow, PreferenceRow, Row, parse_rows
from coserve.data.corpus.staging import PendingCorpus, StagedCorpus
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.documents.encoder import encoded_tokens
from coserve.data.documents.pending import PendingDocument
from coserve.data.evaluation import Question
from coserve.data.offload.pool import HelperPool
from coserve.lora.files.matching import matching_targets
from coserve.lora.files.peft import config_file
from coserve.lora.files.targets import resolve_targets, target_sites
from coserve.state.durable import disk_errors
from coserve.state.registry.records import AdapterRecord, JobOrigin, JobRecord
from coserve.state.registry.registry import Registry

SMALL_FILE = 64 << 10
"""Largest file in bytes that is tokenised in a thread."""
NO_CONTINUATION = "expected LoRA alone: a KV prefix (cartridge) is not trained further"
NO_TEACHER = "it cannot be a teacher; expected an adapter, as NAME or NAME@VERSION"


class Submission:
    """Prepares jobs; nothing is stored yet."""

    def __init__(self, node: Node, helpers: HelperPool) -> None:
        self._config, self._folder, self._registry = node.config, node.folder, node.registry
        self._engine, self._tokenizer = node.engine, node.tokenizer
        room, workers = partial(self._registry.read, _room), self._config.tokenizer_processes
        self._preparation = CorpusPreparation(helpers, self._folder.staging, workers, room=room)
        self._texts = AsyncTokenizer(self._tokenizer, helpers, chats=helpers)
        self._preparing: dict[object, tuple[str, Preparing]] = {}
        """Corpora that are being tokenised, with their projects."""
        self._inspection = Inspection(helpers)
        self._documents = DocumentSubmission(node, helpers)

    async def prepare(
        self,
        request: FinetuneRequest,
        uploaded: UploadedRows,
        spec: BaseSpec,
        show: Show = lambda _: None,
        origin: JobOrigin | None = None,
    ) -> tuple[JobRecord, PendingCorpus | PendingDocument, JobTest | None]:
        """Return the job's record, whose version is provisional, its corpus, and its test rows. `show` is told
        the progress of a large corpus. `origin`: the files of OpenAI's API that are `uploaded`.

        Raises `InvalidRequest`, `CorpusError` subclasses (with the line), `AdapterNotFound`, `AdapterBusy`,
        `BaseMismatch`, `ForbiddenPath`, `JobTooLarge`, `AdapterTooLarge`, `UnsupportedAdapter`.
        """
        refuse_base_name(request.adapter, spec, field="adapter")
        held = await asyncio.to_thread(validation_source, request, uploaded.validation, self._config.data_root)
        if held is not None:  # their number is known once they are read
            request = msgspec.structs.replace(
                request, training=msgspec.structs.replace(request.training, validation_rows=1)
            )
        limit = self._config.micro_batch_tokens
        asked, _ = choose_training(request.training, rows=1, tokens=1, hidden=spec.hidden)
        check_training(asked)  # before the corpus is read
        check_optimizer(asked.optimizer, ranks=self._config.tp)
        await self._check_samples(request.training, spec)
        if request.teacher is not None and asked.loss is not None:
            raise InvalidRequest("expected no loss beside a teacher: distillation has its own", field="training.loss")
        longest = longest_row(asked, spec.context, limit)
        document = None if request.document is None else await self._documents.settings(request, spec)
        earlier = await self._registry(partial(_earlier, request=request, base=spec.fingerprint))
        source, lora = await self._checked_adapter(request, asked, spec, document, earlier)
        teacher, prefix = await self._teacher(request, spec), tuple[int, ...]()
        columns = Columns({str(field): column for field, column in request.columns.items()})
        test = None
        if request.test is not None:
            test = await read_test(request.test, spec, self._texts, partial(self._questions, columns))
        corpus: PendingCorpus | PendingDocument
        if document is not None:
            with self._shown(request.adapter, show):
                corpus = await self._documents.split(request, uploaded.corpus, document)
            chunks = corpus.chunks
            prefix, lora = await asyncio.to_thread(
                document.with_prefix, lora, chunks, self._tokenizer, spec, micro_batch_limit(asked, limit)
            )
        else:
            rows = await asyncio.to_thread(corpus_source, request, uploaded.corpus, self._config.data_root)
            corpus = await self._tokenize(request, rows, held, columns, longest, show)
        try:
            job = JobSpec(
                id=f"job-{secrets.token_hex(8)}",
                adapter=request.adapter,
                version=1,
                init_from=None if source is None else source.ref,
                lora=lora,
                training=asked,
                rows=0,
                tokens=0,
                target_tokens=0,
                init_digests=None if source is None else source.digests,
                teacher=teacher,
                longest=0 if document is None else min(longest, document.tokens_at_once),
                prefix=prefix,
                evaluated=document is not None or test is not None,
            )
            steps, notes = 0, tuple[str, ...]()
            if not isinstance(corpus, PendingDocument):
                job, steps, notes = await self._of_corpus(job, request.training, corpus, spec)
            planned = job
            if earlier is not None:  # the job continues from that job's version
                planned = msgspec.structs.replace(job, init_from=AdapterRef(earlier.spec.adapter, 1))
            await self._check_memory(planned, spec)
        except BaseException:
            await uncancelled_thread(corpus.discard)
            raise
        record = JobRecord(
            spec=job,
            state=JobState.QUEUED,
            created_at=time.time(),
            base_fingerprint=spec.fingerprint,
            total_steps=steps,
            metadata=request.metadata,
            notes=(*notes, *unused_notes(columns.unused)),
            after=None if earlier is None else earlier.spec.id,
            origin=origin,
            document=document.job(corpus.chunks) if document and isinstance(corpus, PendingDocument) else None,
            asked=None if document is None else request.training,
        )
        return record, corpus, test

    async def _checked_adapter(
        self,
        request: FinetuneRequest,
        asked: TrainingSettings,
        spec: BaseSpec,
        document: CheckedDocument | None,
        earlier: JobRecord | None,
    ) -> tuple[AdapterRecord | None, LoraSettings]:
        """Return the adapter to continue from, if it exists, and the settings of the adapter to train, which can be
        trained, loaded and published. `earlier`: the job that makes the adapter to continue from."""
        if earlier is None:
            source, lora = await self._adapter_settings(request, spec, document)
        else:
            source, lora = None, _own_settings(request, earlier)
        check_loss(lora, asked, spec)
        continues = request.continue_from is not None
        given, blocks = ("continue_from", "continue_from") if continues else ("lora", "lora.bd_blocks")
        await asyncio.to_thread(check_ranks, lora, spec, ranks=self._config.tp, field=blocks)
        await refuse_too_large(request.adapter, lora, spec, self._engine.pool, self._config, field=given)
        await asyncio.to_thread(_check_publishable, lora, spec, field=given)
        return source, lora

    async def _of_corpus(
        self, job: JobSpec, wanted: TrainingRequest, corpus: PendingCorpus, base: BaseSpec
    ) -> tuple[JobSpec, int, tuple[str, ...]]:
        """Return the job as `_sized` does, the number of its steps, and notes about its rows."""
        if isinstance(corpus, StagedCorpus) and corpus.validation_rows:
            wanted = msgspec.structs.replace(wanted, validation_rows=corpus.validation_rows)
        arrays = await asyncio.to_thread(corpus.arrays)
        job, steps = await self._sized(job, wanted, corpus, arrays, base)
        return job, steps, await asyncio.to_thread(row_notes, arrays, corpus.rows_cut, self._tokenizer)

    async def _check_memory(self, job: JobSpec, base: BaseSpec) -> None:
        """Raise `JobTooLarge` for a job that the engine can never have in memory."""
        if (memory := self._engine.memory) is not None:
            await asyncio.to_thread(check_fits, job, base, memory, self._config.micro_batch_tokens)

    async def _sized(
        self, job: JobSpec, wanted: TrainingRequest, corpus: PendingCorpus, arrays: Corpus, base: BaseSpec
    ) -> tuple[JobSpec, int]:
        """Return the job with the corpus's sizes and the settings chosen for them, and the number of its steps."""
        training, auto = choose_training(
            wanted,
            rows=corpus.rows,
            tokens=corpus.token_count * (2 if wanted.mismatches else 1),
            targets=corpus.target_tokens,
            hidden=base.hidden,
            distills=job.teacher is not None and job.init_from is not None,
            cartridge=job.lora.cartridge,
        )
        lengths = await asyncio.to_thread(lambda: arrays.lengths)
        encoded = encoded_tokens(job)
        plan = await asyncio.to_thread(BatchPlan, lengths, training, self._config.micro_batch_tokens - encoded)
        if training.warmup_ratio is not None:
            warmup = math.ceil(training.warmup_ratio * plan.total_steps)
            training = msgspec.structs.replace(training, warmup_steps=warmup, warmup_ratio=None)
        digest = await asyncio.to_thread(lambda: corpus.digest)
        sized = msgspec.structs.replace(
            job,
            training=training,
            rows=corpus.rows,
            tokens=corpus.token_count,
            target_tokens=corpus.target_tokens,
            rows_cut=corpus.rows_cut,
            auto=auto,
            longest=int(plan.lengths.max()) + encoded,
            corpus_digest=digest,
            soft_targets=arrays.candidates is not None,
        )
        return sized, plan.total_steps

    async def complete(self, record: JobRecord, corpus: Corpus) -> tuple[JobSpec, int]:
        """Return the job of a document with the sizes of its corpus, and the number of its steps. Raises
        `JobTooLarge`."""
        assert record.asked is not None, "expected a document's job"
        base = self._engine.spec
        job, steps = await self._sized(record.spec, record.asked, corpus, corpus, base)
        await self._check_memory(job, base)
        return job, steps

    async def _adapter_settings(
        self, request: FinetuneRequest, spec: BaseSpec, document: CheckedDocument | None
    ) -> tuple[AdapterRecord | None, LoraSettings]:
        """Return the adapter to continue from and its settings, or None and the settings in the request."""
        if document is not None and document.cartridge is not None:
            return None, document.cartridge
        if request.continue_from is None:
            asked = LoraRequest() if request.lora is None else request.lora
            if isinstance(asked.targets, str):
                targets = await asyncio.to_thread(matching_targets, asked.targets, spec, field="lora.targets")
                asked = msgspec.structs.replace(asked, targets=targets)
            lora = with_end_names(LoraSettings(**msgspec.structs.asdict(asked)), spec)
            lora = lora if document is None else document.lora(lora, spec)
            try:
                await asyncio.to_thread(resolve_targets, lora, spec)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, field=f"lora.{error.field}") from None
            return None, lora
        _refuse_lora(request)
        name, version = split_ref(request.continue_from)
        record = await find_adapter(self._registry, name, version, spec, field="continue_from")
        if record.prefix:
            raise InvalidRequest(NO_CONTINUATION, field="continue_from")
        settings = await self._inspection.settings(self._folder.adapter(record.ref), spec)
        try:
            await asyncio.to_thread(resolve_targets, settings, spec)  # what is served may be out of training's ranges
        except InvalidRequest as error:
            raise InvalidRequest(f"{record.ref} cannot be trained: {error}", field="continue_from") from None
        return record, settings

    async def _questions(self, columns: Columns, path: str) -> list[Question]:
        """Return the questions in a file of test rows below `data_root`: at most one more than is allowed, so that the
        caller sees that there are too many."""
        source = await asyncio.to_thread(local_rows, path, self._config.data_root)
        return await self._preparation.questions(source, columns, MAX_EVAL_ROWS + 1)

    async def _check_samples(self, training: TrainingRequest, spec: BaseSpec) -> None:
        """Raise `InvalidRequest` for samples that the engine cannot generate."""
        field = "training.sample_prompts"
        for index, prompt in enumerate(training.sample_prompts):
            request = sample_request(training, prompt)
            try:
                check_generate(request, spec)
                await encode_prompt(request, spec, self._texts)
            except RequestError as error:
                if error.field == "max_tokens":
                    raise InvalidRequest(error.message, field="training.sample_max_tokens") from None
                raise InvalidRequest(f"prompt {index}: {error.message}", field=field) from error

    async def _teacher(self, request: FinetuneRequest, spec: BaseSpec) -> Teacher | None:
        if request.teacher is None:
            return None
        name, version = split_ref(request.teacher)
        record = await find_adapter(self._registry, name, version, spec, field="teacher", of_base=NO_TEACHER)
        if record.prefix:
            raise InvalidRequest("expected LoRA alone: a KV prefix (cartridge) cannot be a teacher", field="teacher")
        return Teacher(ref=record.ref, digests=record.digests, rank=record.rank)

    async def _tokenize(
        self, request: FinetuneRequest, source: Source, held: Source | None, columns: Columns, longest: int, show: Show
    ) -> PendingCorpus:
        """Tokenise a small corpus of texts in a thread, other corpora and all chats in helper processes, which are
        killed when the client leaves. `held`: rows for validation."""
        asked = request.training
        pairs, labelled = isinstance(asked.loss, PairLoss), isinstance(asked.loss, KtoLoss)
        options = Tokenization(longest, asked.train_on, pairs, labelled, asked.one_row_per_answer)
        if held is None and (isinstance(source, list) or await asyncio.to_thread(_small, source, columns)):
            rows = parse_rows(source, columns) if isinstance(source, list) else parse_jsonl(source, columns=columns)
            with suppress(_Chat):
                return await asyncio.to_thread(tokenize_rows, _texts(rows), self._tokenizer, options)
        with suppress(CoserveError):  # rows that need the template will report the error
            await self._texts.read_template()
        async with AsyncExitStack() as stack:
            file = await stack.enter_async_context(self._file(source))
            validation = None if held is None else await stack.enter_async_context(self._file(held))
            report = stack.enter_context(self._shown(request.adapter, show))
            return await self._preparation.tokenize(file, options, report, columns, validation)

    @asynccontextmanager
    async def _file(self, source: Source) -> AsyncIterator[Path]:
        """Yield the source as a file or folder; inline rows are written to a file, which is deleted when the block
        ends."""
        if isinstance(source, Path):
            yield source
            return
        file = self._folder.staging / f"rows-{secrets.token_hex(8)}"
        try:
            await uncancelled_thread(_write_rows, file, source)
            yield file
        finally:
            await uncancelled_thread(file.unlink, missing_ok=True)

    @contextmanager
    def _shown(self, adapter: str, show: Show) -> Iterator[Report]:
        """List a corpus in `preparing` inside the block."""
        key, began, project = object(), time.time(), principal().project

        def report(rows: int, progress: float) -> None:
            found = Preparing(adapter, began, rows, progress)
            self._preparing[key] = (project, found)
            show(found)

        report(0, 0.0)
        try:
            yield report
        finally:
            del self._preparing[key]

    @property
    def preparing(self) -> list[Preparing]:
        """Progress of large corpora that are being tokenised, the latest first."""
        return [found for project, found in reversed(self._preparing.values()) if principal().sees(project)]


def _earlier(registry: Registry, *, request: FinetuneRequest, base: str) -> JobRecord | None:
    """Return the job whose version this one will continue from. Raises `AdapterBusy`, `NameTaken`."""
    registry.check_name(request.adapter)
    refuse_conflict(registry, request)
    found = last_job(registry, request.adapter) if serialised(request) else None
    return found if found is not None and found.base_fingerprint == base else None


def _check_publishable(lora: LoraSettings, spec: BaseSpec, *, field: str) -> None:
    """Raise `UnsupportedAdapter` for settings whose adapter file could not be read again."""
    config_file(lora, spec, target_sites(lora, spec), field=field)


class _Chat(Exception):
    """A row is a chat, or contains chats."""


def _texts(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows; raise `_Chat` at the first that only a helper process may render."""
    for row in rows:
        if isinstance(row, LabelledRow):
            answer: Row = row.answer
        else:
            answer = row.chosen if isinstance(row, PreferenceRow) else row
        if isinstance(answer, ChatRow):
            raise _Chat
        yield row


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    with disk_errors():
        file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _small(source: Path, columns: Columns) -> bool:
    return is_json_lines(source, columns) and source.stat().st_size <= SMALL_FILE


def _room(registry: Registry) -> int:
    """Return the bytes of rows that a gzip file may hold: no more than the quota leaves beside the adapters."""
    project = principal().project
    limit = registry.quota(project).bytes
    return MAX_UNPACKED if limit is None else min(MAX_UNPACKED, max(0, limit - registry.adapter_bytes(project)))


def _own_settings(request: FinetuneRequest, earlier: JobRecord) -> LoraSettings:
    _refuse_lora(request)
    if earlier.spec.prefix:
        raise InvalidRequest(NO_CONTINUATION, field="continue_from")
    return earlier.spec.lora


def _refuse_lora(request: FinetuneRequest) -> None:
    if request.lora is not None:
        raise InvalidRequest("expected no lora settings: continue_from has its own", field="lora")
