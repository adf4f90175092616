"""The SDK's implementation, for asyncio; `synchronous.py` wraps it."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Never, Self, Unpack
from urllib.parse import quote

from coserve.client.adapter_files import local_files, save_adapter
from coserve.client.caller import Caller, RetryPolicy, decode
from coserve.client.failures import response_error
from coserve.client.handles import AsyncJobHandle
from coserve.client.options import (
    DocumentOptions,
    GenerateOptions,
    LoraOptions,
    Messages,
    Prompt,
    adapter_upload,
    check_header,
    corpus_body,
    corpus_upload,
    cut_warning,
    document_file,
    finetune_request,
    generate_request,
)
from coserve.client.training import AsyncTrainingSession
from coserve.client.transport import HttpTransport, Response, Transport
from coserve.core.errors import InternalError, InvalidRequest, Unreachable
from coserve.core.health import Health
from coserve.core.hints import fields_of, hint
from coserve.core.schemas import adapters as schemas
from coserve.core.schemas.generation import GenerateChunk, GenerateResponse
from coserve.core.schemas.jobs import EvalRequest, FinetuneRequest, Job, JobList, OnConflict, Preparing, RowField
from coserve.core.schemas.service import STREAM_END
from coserve.core.training.schemas import Session, SessionRequest
from coserve.core.training.settings import TrainingRequest
from coserve.core.validation import check_one_given

DEFAULT_URL = "http://127.0.0.1:8000"


class AsyncClient:
    """An asyncio client of a daemon. Close it, or use it as `async with AsyncClient() as client`.

    Every method raises the exception of `coserve.core.errors` that the daemon's error code names, or `Unreachable` if
    no daemon answers. Responses of 429 and 503 are retried according to `retry`. `read_timeout`: seconds of silence
    after which a connection is closed; `sleep` and `rng` are for tests.

    `base_url` defaults to COSERVE_URL and `api_key` to COSERVE_API_KEY, as on the command line.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        read_timeout: float = 300.0,
        transport: Transport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        base_url = (os.environ.get("COSERVE_URL") or DEFAULT_URL) if base_url is None else base_url
        api_key = os.environ.get("COSERVE_API_KEY") or None if api_key is None else api_key
        if api_key is not None:
            check_header(api_key, "api_key")
        self._own = None
        if transport is None:
            transport = self._own = HttpTransport(base_url, read_timeout=read_timeout)
        self._caller = Caller(transport, api_key=api_key, retry=retry or RetryPolicy(), sleep=sleep, rng=rng)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; a transport that the caller passed stays open. Later calls raise `InvalidRequest`."""
        self._caller.close()
        if self._own is not None:
            await self._own.close()

    # ---- generate

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        adapter: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResponse:
        """Continue a text, token ids or a conversation, with the base or `adapter` (`name` or `name@version`)."""
        body = generate_request(prompt, messages, adapter, False, options)
        return await self._caller.call("POST", "/generate", GenerateResponse, body=body)

    async def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        adapter: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Generate like `generate`, but yield chunks as they arrive. To stop early, close the generator
        (`contextlib.aclosing`): the daemon then cancels the request."""
        body = generate_request(prompt, messages, adapter, True, options)
        request = self._caller.request("POST", "/generate", headers={"Accept": "text/event-stream"}, body=body)
        async with aclosing(self._caller.events(request)) as events:
            async for event in events:
                if event.data == STREAM_END:
                    return
                yield decode(event.data, GenerateChunk)
        raise Unreachable("the stream broke off before its end", sent=True)

    # ---- fine-tune

    async def finetune(
        self,
        /,
        adapter: str,
        data: Iterable[Mapping[str, Any]] | Path | str | None = None,
        *,
        file: Path | str | bytes | None = None,
        path: str | None = None,
        validation: Iterable[Mapping[str, Any]] | Path | str | None = None,
        continue_from: str | None = None,
        teacher: str | None = None,
        lora: LoraOptions | None = None,
        training: TrainingRequest | Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        on_conflict: OnConflict = "wait",
        columns: Mapping[RowField, str] | None = None,
        test: EvalRequest | Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        on_preparing: Callable[[Preparing], None] | None = None,
        **unknown: Never,
    ) -> AsyncJobHandle:
        """Start a job that makes the next version of `adapter`. The corpus is one of: rows (`data`), a local file or
        its content (`file`: JSON Lines, CSV, parquet or a JSON array), or the path of a file at the daemon (`path`). A
        path given as `data` names a local file. docs/guide/data.md describes rows; `columns` maps fields of a row to
        the corpus's columns: `{"prompt": "question", "completion": "answer"}`.

        `validation`: rows that are not trained on, or the path of a local file of rows in one of these formats. The
        loss on them is measured every `training.eval_steps`. Only with `data` or `file`.

        With a `teacher` the job learns that adapter's outputs at the rows' targets instead of their tokens
        (distillation).

        `test` has rows that are not trained on: `{"data": rows}`, or `{"path": ...}` at the daemon, with `regex` or
        `json_field` if answers are compared by a part. The trained adapter and the base answer them, as in `coserve
        eval`; the measures are `test` of the job.

        While an unfinished job trains `adapter`, a new job with `continue_from=adapter` waits for it and continues from
        the version that it publishes. `on_conflict="fork"` starts at once, from the current version; `"refuse"` raises
        `AdapterBusy`.

        Returns once the whole corpus is tokenised. For a large corpus, `on_preparing` is called with the progress (by
        `Client` on the calling thread, so that it may use the client).

        Warns (`UserWarning`) if rows were truncated because they were too long.

        An accepted job survives any crash of the daemon. `idempotency_key` identifies the request: a repetition returns
        the job that the first one made, and another request with the same key raises `IdempotencyMismatch`. By default
        each call has its own key, so that retries never make two jobs.
        """
        for name in unknown:
            meant = hint(name, "", fields_of(FinetuneRequest))
            raise TypeError(f"finetune() got an unexpected keyword argument {name!r}{meant}")
        if sum(each is not None for each in (data, file, path)) > 1:
            raise InvalidRequest(
                "expected one of data, file and path, got more", field="data" if file is None else "file"
            )
        headers = {"Idempotency-Key": _checked_key(idempotency_key), "Accept": "text/event-stream, application/json"}
        if isinstance(data, str | Path):
            data, file = None, data
        body = finetune_request(
            adapter,
            data=data,
            path=path,
            continue_from=continue_from,
            teacher=teacher,
            lora=lora,
            training=training,
            metadata=metadata,
            on_conflict=on_conflict,
            columns=columns,
            test=test,
        )
        upload = await asyncio.to_thread(corpus_body, body, file, validation)
        request = self._caller.request("POST", "/finetune", headers=headers, body=upload)
        job = await self._caller.submit(request, on_preparing or (lambda _: None))
        self._warn_of_cut(job)
        return AsyncJobHandle(self._caller, job)

    async def learn(
        self,
        adapter: str,
        text: str | None = None,
        *,
        file: Path | str | bytes | Iterable[Path | str] | None = None,
        path: str | None = None,
        continue_from: str | None = None,
        lora: LoraOptions | None = None,
        training: TrainingRequest | Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        on_conflict: OnConflict = "wait",
        idempotency_key: str | None = None,
        **settings: Unpack[DocumentOptions],
    ) -> AsyncJobHandle:
        """Start a job whose adapter knows a document without it in the prompt. The document is one of: a `text`, a
        local `file` (text, Markdown or PDF), its content, a folder or several of them, or the `path` of a file or
        folder at the daemon.

        `settings` are those of `coserve.core.schemas.documents.DocumentSettings` (`recipe`, `generator`, `questions`,
        ...); `lora`, `training` and the others are as in `finetune`. The job's `info.document` has its phase and, at
        the end, its evaluation; a job whose adapter has learned nothing fails with `NotLearned`.
        docs/guide/documents.md describes all.
        """
        check_one_given({"text": text, "file": file, "path": path}, field="text")
        document = {"text": text, "path": path, **settings}
        body = finetune_request(
            adapter,
            document={name: value for name, value in document.items() if value is not None},
            continue_from=continue_from,
            lora=lora,
            training=training,
            metadata=metadata,
            on_conflict=on_conflict,
        )
        headers = {"Idempotency-Key": _checked_key(idempotency_key)}
        upload = body if file is None else corpus_upload(body, await asyncio.to_thread(document_file, file))
        request = self._caller.request("POST", "/finetune", headers=headers, body=upload)
        return AsyncJobHandle(self._caller, await self._caller.submit(request, lambda _: None))

    def _warn_of_cut(self, job: Job) -> None:
        """Warn of truncated rows, at the caller's line that awaits `finetune`."""
        if (warning := cut_warning(job)) is not None:
            warnings.warn(warning, stacklevel=3)

    async def job(self, id: str) -> AsyncJobHandle:
        """Return a handle to an existing job. Raises `JobNotFound`."""
        return AsyncJobHandle(self._caller, await self._caller.call("GET", f"/finetune/{_quoted(id)}", Job))

    async def jobs(self, *, after: str | None = None, limit: int | None = None) -> JobList:
        """Return a page of jobs, newest first, as `data`; `has_more`: the next page is `after` the last one's id."""
        query = {"after": after, "limit": limit}
        return await self._caller.call("GET", "/finetune", JobList, query=query)

    async def training_session(
        self,
        *,
        r: int = 16,
        alpha: float | None = None,
        targets: Iterable[str] | None = None,
        seed: int = 0,
        state: str | None = None,
        with_optimizer: bool = True,
    ) -> AsyncTrainingSession:
        """Open a session whose steps come from this program: a loss or a loop of its own (RL, DPO). Fields are those of
        `coserve.core.training.schemas.SessionRequest`; `state`: what `AsyncTrainingSession.save` returned. Returns once
        it is in memory; it ends with its daemon, and when no call came for the daemon's `session_timeout`."""
        targets = None if targets is None else tuple(targets)
        body = SessionRequest(r=r, alpha=alpha, targets=targets, seed=seed, state=state, with_optimizer=with_optimizer)
        opened = await self._caller.call("POST", "/sessions", Session, body=body)
        return AsyncTrainingSession(self._caller, opened)

    # ---- adapters

    async def adapters(
        self,
        *,
        after: str | None = None,
        limit: int | None = None,
        search: str | None = None,
        base: str | None = None,
        source: str | None = None,
        resident: bool | None = None,
        tag: str | None = None,
    ) -> schemas.AdapterList:
        """Return a page of adapters (their current versions), by name: those whose name contains `search`, of the base
        with this name, made by this `source` (job, import, load, convert), in memory or not, with this tag. The list is
        `data`; `has_more`: the next page is `after` the last one's id."""
        query = {"after": after, "limit": limit, "search": search, "base": base, "source": source, "tag": tag}
        query |= {"resident": None if resident is None else str(resident).lower()}
        return await self._caller.call("GET", "/adapters", schemas.AdapterList, query=query)

    async def adapter(self, ref: str) -> schemas.Adapter:
        """Return an adapter by `name` (its current version) or `name@version`. Raises `AdapterNotFound`."""
        return await self._caller.call("GET", f"/adapters/{_quoted(ref)}", schemas.Adapter)

    async def import_adapter(
        self, name: str, folder: Path | str | None = None, *, path: str | None = None
    ) -> schemas.Adapter:
        """Make PEFT files the next version of `name`: a local folder or archive (.tar, .tar.gz, .zip), a URL that
        fsspec opens (`s3://...`, or `hf://OWNER/NAME` on the hub), or the path of a folder at the daemon."""
        check_one_given({"folder": folder, "path": path}, field="folder")
        if folder is None:
            body = schemas.ImportRequest(name=name, path=path)
            return await self._caller.call("POST", "/adapters", schemas.Adapter, body=body)
        async with local_files(folder) as source:
            upload = adapter_upload(name, source)
            return await self._caller.call("POST", "/adapters", schemas.Adapter, body=upload)

    async def download_adapter(self, ref: str, folder: Path | str) -> Path:
        """Save PEFT files into `folder`, which must be missing or empty, and return it."""
        response = await self._caller.stream(self._caller.request("GET", f"/adapters/{_quoted(ref)}/download"))
        return await save_adapter(response, Path(folder))

    async def delete_adapter(self, ref: str) -> schemas.DeletedAdapter:
        """Delete one version (`name@version`) or all (`name`). Raises `AdapterNotFound`, `AdapterBusy`."""
        return await self._caller.call("DELETE", f"/adapters/{_quoted(ref)}", schemas.DeletedAdapter)

    async def rollback_adapter(self, name: str, version: int) -> schemas.Adapter:
        """Make an older version the current one of `name`, until a newer one is published. Raises `AdapterNotFound`."""
        body = schemas.RollbackRequest(version=version)
        return await self._caller.call("POST", f"/adapters/{_quoted(name)}/rollback", schemas.Adapter, body=body)

    async def update_adapter(
        self, ref: str, *, tags: Iterable[str] | None = None, ttl: float | None = None, pinned: bool | None = None
    ) -> schemas.Adapter:
        """Set the tags of a name, its time to live (`ttl` seconds from now, 0: none), or whether a version stays in
        host memory. None changes nothing. Raises `AdapterNotFound`."""
        body = schemas.AdapterUpdate(tags=None if tags is None else tuple(tags), ttl=ttl, pinned=pinned)
        return await self._caller.call("PATCH", f"/adapters/{_quoted(ref)}", schemas.Adapter, body=body)

    async def aliases(self) -> list[schemas.Alias]:
        """Return every alias, by name."""
        return (await self._caller.call("GET", "/aliases", schemas.AliasList)).data

    async def set_alias(
        self, name: str, target: str, *, canary: str | None = None, weight: float = 0.0
    ) -> schemas.Alias:
        """Create the alias `name` for a version of an adapter, or move it to that version. A fraction `weight` of its
        requests gets another version, `canary`. Raises `AdapterNotFound`, `NameTaken` for an adapter's name."""
        body = schemas.AliasRequest(target=target, canary=canary, weight=weight)
        return await self._caller.call("PUT", f"/aliases/{_quoted(name)}", schemas.Alias, body=body)

    async def promote_alias(self, name: str) -> schemas.Alias:
        """Give all requests of an alias to its canary. Raises `InvalidRequest` if there is none."""
        return await self._caller.call("POST", f"/aliases/{_quoted(name)}/promote", schemas.Alias)

    async def rollback_alias(self, name: str) -> schemas.Alias:
        """Remove an alias's canary; if it has none, return to its previous version."""
        return await self._caller.call("POST", f"/aliases/{_quoted(name)}/rollback", schemas.Alias)

    async def delete_alias(self, name: str) -> schemas.Alias:
        """Delete an alias; the adapter stays."""
        return await self._caller.call("DELETE", f"/aliases/{_quoted(name)}", schemas.Alias)

    async def prefetch_adapter(self, ref: str) -> schemas.Adapter:
        """Let the daemon read an adapter into memory before a request needs it; does not wait for it. Raises
        `AdapterNotFound`, `BaseMismatch`."""
        return await self._caller.call("POST", f"/adapters/{_quoted(ref)}/prefetch", schemas.Adapter)

    async def convert_adapter(
        self,
        ref: str,
        bd_blocks: int,
        *,
        rank: int | None = None,
        max_error: float | None = None,
        name: str | None = None,
        distill: schemas.Distillation | None = None,
    ) -> schemas.ConvertedAdapter:
        """Convert `ref` to a BD-LoRA adapter of `bd_blocks` blocks (1: plain LoRA) and publish it as `name`. The result
        is the nearest adapter with total LoRA rank `rank`, or with the smallest rank whose relative error is at most
        `max_error` (0.05). A large adapter takes minutes: see `read_timeout`. `distill`: a job that then trains the
        result; the answer has its id.

        Raises `AdapterNotFound`, and `InvalidRequest` for blocks, a rank or rows that do not fit; nothing is published
        then.
        """
        body = schemas.ConvertRequest(bd_blocks=bd_blocks, rank=rank, max_error=max_error, name=name, distill=distill)
        return await self._caller.call("POST", f"/adapters/{_quoted(ref)}/convert", schemas.ConvertedAdapter, body=body)

    # ---- the daemon

    async def health(self) -> Health:
        """Return the daemon's health, without waiting. A daemon that starts or recovers (status 503) raises no
        error."""
        content = await self._caller.read(self._caller.request("GET", "/health"), accepted=(503,))
        try:
            return decode(content, Health)
        except InternalError:  # the body is an error of the API, not a health
            raise await response_error(Response(503, body=content)) from None

    async def wait_ready(self, *, timeout: float | None = 600.0) -> Health:  # noqa: ASYNC109 - as in every SDK
        """Wait until the daemon is ready (`GET /health/ready` answers 200), also if it does not listen yet.

        Raises `TimeoutError` after `timeout` seconds; None: wait forever.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._caller.call("GET", "/health/ready", Health, wait=True)
        except TimeoutError:
            raise TimeoutError(f"the daemon was not ready after {timeout} s") from None

    async def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return (await self._caller.read(self._caller.request("GET", "/metrics"))).decode()

    async def openapi(self) -> dict[str, Any]:
        """Return the API's OpenAPI 3.1 document."""
        return await self._caller.call("GET", "/openapi.json", dict[str, Any])


def _checked_key(given: str | None) -> str:
    """Return an `Idempotency-Key`: a new one if none is given. Raises `InvalidRequest`."""
    key = uuid.uuid4().hex if given is None else given
    check_header(key, "idempotency_key")
    return key


def _quoted(id: str) -> str:
    return quote(id, safe="@")
