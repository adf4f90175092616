"""The SDK for programs without asyncio: each call runs the method of `AsyncClient` on an event loop in a thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from coserve.client.asynchronous import AsyncClient
from coserve.client.caller import CLOSED
from coserve.client.handles import AsyncJobHandle
from coserve.client.options import GenerateOptions, Messages, Prompt, cut_warning, rows_of
from coserve.client.retry import RetryPolicy
from coserve.client.transport import Transport
from coserve.core.errors import InvalidRequest
from coserve.core.health import Health
from coserve.core.schemas import (
    Adapter,
    AdapterList,
    ConvertedAdapter,
    DeletedAdapter,
    DeletedJob,
    Distillation,
    GenerateChunk,
    GenerateResponse,
    Job,
    JobEvent,
    JobList,
    OnConflict,
    Preparing,
    RowField,
)
from coserve.core.types import LoraSettings, TrainingRequest

S = TypeVar("S")
T = TypeVar("T")


class _Portal:
    """An event loop in a thread, and calls into it from other threads. After `close`, new calls and those in flight
    raise `InvalidRequest`.

    `closing` is awaited at the loop's end: at `close`, or when the object is garbage-collected.
    """

    def __init__(self, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="coserve-client", daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _stop, self._loop, self._thread, closing)
        self._closing = threading.RLock()
        """Prevents new work on the loop while it ends. Reentrant, since a signal handler or the garbage collector may
        call while its thread holds the lock."""

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. An interruption of the wait (Ctrl-C) cancels it."""
        with self._running(work) as future:
            return future.result()

    def call_and_show(
        self, work: Callable[[Callable[[S], None]], Coroutine[Any, Any, T]], show: Callable[[S], None]
    ) -> T:
        """Run a coroutine that reports progress, as `call` does. `show` gets each report on the calling thread, since
        on the loop's thread it could not use the client. If it raises, the coroutine is cancelled."""
        reports = SimpleQueue[S | None]()
        with self._running(work(reports.put)) as future:
            future.add_done_callback(lambda _: reports.put(None))
            while (report := reports.get()) is not None:
                show(report)
            return future.result()

    @contextmanager
    def _running(self, work: Coroutine[Any, Any, T]) -> Iterator[Future[T]]:
        """Run the coroutine on the loop during the block; an error in the block cancels it."""
        future = self._begin(work)
        try:
            yield future
        except CancelledError:
            raise InvalidRequest(CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            self._check_thread()
            with self._closing:
                if not self._close.alive:
                    raise InvalidRequest(CLOSED)
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except InvalidRequest:
            work.close()
            raise

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidRequest(
                "expected a call from another thread: on the client's own one it would wait for itself"
            )

    def iterate(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Turn an asynchronous generator into a plain one; closing the result closes `source`."""
        try:
            while True:
                try:
                    item = self.call(_next(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if self._close.alive:  # otherwise the loop's end has closed it
                self.call(source.aclose())

    def close(self) -> None:
        self._check_thread()
        with self._closing:
            self._close()


async def _next(source: AsyncGenerator[T, None]) -> T:
    return await anext(source)


def _stop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, closing: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Cancel all tasks, then end the loop and its thread."""
    asyncio.run_coroutine_threadsafe(_finish(closing), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _finish(closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await closing()
    # The loop's executor is not waited for: that needs a new thread, which an exiting interpreter cannot start.
    await loop.shutdown_asyncgens()


def _texts_of(asynchronous: type) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that copies missing docstrings from the asynchronous class, for `help`."""

    def copied(kind: type[T]) -> type[T]:
        for name, method in vars(kind).items():
            if inspect.isfunction(method) and not name.startswith("_") and method.__doc__ is None:
                method.__doc__ = getattr(asynchronous, name).__doc__
        return kind

    return copied


@_texts_of(AsyncJobHandle)
class JobHandle:
    """A handle to one job; see `AsyncJobHandle`."""

    def __init__(self, portal: _Portal, handle: AsyncJobHandle) -> None:
        self._portal, self._handle = portal, handle

    def __repr__(self) -> str:
        return repr(self._handle).replace(type(self._handle).__name__, type(self).__name__)

    @property
    def id(self) -> str:
        return self._handle.id

    @property
    def info(self) -> Job:
        return self._handle.info

    def refresh(self) -> Job:
        return self._portal.call(self._handle.refresh())

    def pause(self) -> Job:
        return self._portal.call(self._handle.pause())

    def resume(self) -> Job:
        return self._portal.call(self._handle.resume())

    def cancel(self) -> Job:
        return self._portal.call(self._handle.cancel())

    def delete(self) -> DeletedJob:
        return self._portal.call(self._handle.delete())

    def events(self, after: int = 0) -> Generator[JobEvent, None, None]:
        return self._portal.iterate(self._handle.events(after))

    def wait(self, *, progress: bool | None = None, timeout: float | None = None, check: bool = True) -> Job:
        return self._portal.call(self._handle.wait(progress=progress, timeout=timeout, check=check))


class _QuietClient(AsyncClient):
    """An `AsyncClient` that does not warn of truncated rows. `Client` warns, since only its thread knows the caller's
    line."""

    def _warn_of_cut(self, job: Job) -> None:
        pass


@_texts_of(AsyncClient)
class Client:
    """A client of a daemon, with the methods of `AsyncClient`. Close it, or use it as `with Client() as client`."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        read_timeout: float = 300.0,
        transport: Transport | None = None,
    ) -> None:
        self._client = _QuietClient(
            base_url, api_key=api_key, retry=retry, read_timeout=read_timeout, transport=transport
        )
        self._portal = _Portal(self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._portal.close()

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        adapter: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResponse:
        return self._portal.call(self._client.generate(prompt, messages=messages, adapter=adapter, **options))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        adapter: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[GenerateChunk, None, None]:
        return self._portal.iterate(self._client.stream(prompt, messages=messages, adapter=adapter, **options))

    def finetune(
        self,
        adapter: str,
        data: Iterable[Mapping[str, Any]] | Path | str | None = None,
        *,
        file: Path | str | bytes | None = None,
        path: str | None = None,
        continue_from: str | None = None,
        teacher: str | None = None,
        lora: LoraSettings | Mapping[str, Any] | None = None,
        training: TrainingRequest | Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        on_conflict: OnConflict = "wait",
        columns: Mapping[RowField, str] | None = None,
        idempotency_key: str | None = None,
        on_preparing: Callable[[Preparing], None] | None = None,
    ) -> JobHandle:
        def work(show: Callable[[Preparing], None]) -> Coroutine[Any, Any, AsyncJobHandle]:
            return self._client.finetune(
                adapter,
                rows,
                file=file,
                path=path,
                continue_from=continue_from,
                teacher=teacher,
                lora=lora,
                training=training,
                metadata=metadata,
                on_conflict=on_conflict,
                columns=columns,
                idempotency_key=idempotency_key,
                on_preparing=show,
            )

        # Read the rows on this thread, since the iterable may use the client, as `on_preparing` may.
        rows = data if data is None or isinstance(data, str | Path) else rows_of(data)
        handle = self._portal.call_and_show(work, on_preparing or (lambda _: None))
        if (warning := cut_warning(handle.info)) is not None:
            warnings.warn(warning, stacklevel=2)
        return JobHandle(self._portal, handle)

    def job(self, id: str) -> JobHandle:
        return JobHandle(self._portal, self._portal.call(self._client.job(id)))

    def jobs(self, *, after: str | None = None, limit: int | None = None) -> JobList:
        return self._portal.call(self._client.jobs(after=after, limit=limit))

    def adapters(self, *, after: str | None = None, limit: int | None = None) -> AdapterList:
        return self._portal.call(self._client.adapters(after=after, limit=limit))

    def adapter(self, ref: str) -> Adapter:
        return self._portal.call(self._client.adapter(ref))

    def import_adapter(self, name: str, folder: Path | str | None = None, *, path: str | None = None) -> Adapter:
        return self._portal.call(self._client.import_adapter(name, folder, path=path))

    def download_adapter(self, ref: str, folder: Path | str) -> Path:
        return self._portal.call(self._client.download_adapter(ref, folder))

    def delete_adapter(self, ref: str) -> DeletedAdapter:
        return self._portal.call(self._client.delete_adapter(ref))

    def rollback_adapter(self, name: str, version: int) -> Adapter:
        return self._portal.call(self._client.rollback_adapter(name, version))

    def convert_adapter(
        self,
        ref: str,
        bd_blocks: int,
        *,
        rank: int | None = None,
        max_error: float | None = None,
        name: str | None = None,
        distill: Distillation | None = None,
    ) -> ConvertedAdapter:
        return self._portal.call(
            self._client.convert_adapter(ref, bd_blocks, rank=rank, max_error=max_error, name=name, distill=distill)
        )

    def health(self) -> Health:
        return self._portal.call(self._client.health())

    def wait_ready(self, *, timeout: float | None = 600.0) -> Health:
        return self._portal.call(self._client.wait_ready(timeout=timeout))

    def metrics(self) -> str:
        return self._portal.call(self._client.metrics())

    def openapi(self) -> dict[str, Any]:
        return self._portal.call(self._client.openapi())
