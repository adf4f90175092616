"""The SDK for programs without asyncio: each call runs the method of `AsyncClient` on an event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import update_wrapper, wraps
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from coserve.client.asynchronous import AsyncClient
from coserve.client.caller import CLOSED, RetryPolicy
from coserve.client.handles import AsyncJobHandle
from coserve.client.options import cut_warning, rows_of
from coserve.client.training import AsyncTrainingSession
from coserve.client.transport import Transport
from coserve.core.cancellation import cancel_all
from coserve.core.errors import InvalidRequest
from coserve.core.schemas.jobs import Job, Preparing
from coserve.core.training.schemas import Session

A = TypeVar("A")
H = TypeVar("H", AsyncJobHandle, AsyncTrainingSession)
P = ParamSpec("P")
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
        items = _Items(source)
        try:
            while True:
                try:
                    item = self.call(items.next())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if self._close.alive:  # otherwise the loop's end has closed it
                self.call(items.close())

    def close(self) -> None:
        self._check_thread()
        with self._closing:
            self._close()


class _Items(Generic[T]):
    """The items of an asynchronous generator. It can be closed while one is awaited: an interruption may come at any
    place of the waiting thread, also before that knows what it waits for."""

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source
        self._awaiting: asyncio.Task[Any] | None = None

    async def next(self) -> T:
        self._awaiting = asyncio.current_task()
        try:
            return await anext(self._source)
        finally:
            self._awaiting = None

    async def close(self) -> None:
        if self._awaiting is not None:
            if not self._awaiting.cancelling():  # a second time would interrupt its cleaning up
                self._awaiting.cancel()
            await asyncio.wait([self._awaiting])
        await self._source.aclose()


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
    await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})
    await closing()
    # The loop's executor is not waited for: that needs a new thread, which an exiting interpreter cannot start.
    await loop.shutdown_asyncgens()


class _Blocking(Generic[A]):
    """Base of classes whose methods run those of an asynchronous object."""

    def __init__(self, portal: _Portal, asynchronous: A) -> None:
        self._portal, self._asynchronous = portal, asynchronous


class _Closing(_Blocking[A]):
    """Base of blocking classes that `with` closes."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def _own_name(face: object, method: Callable[..., object]) -> Iterator[None]:
    """Name the class of `face` in an error of the arguments of `method`, where Python names the asynchronous class."""
    try:
        yield
    except TypeError as error:
        own = f"{type(face).__name__}.{method.__name__}"
        raise TypeError(str(error).replace(method.__qualname__, own)) from None


def _call(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[_Blocking[A], P], T]:
    """Return the blocking form of a method, with its arguments and docstring."""
    return _call_for(method, lambda _, found: found)


def _call_for(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, S]], face: Callable[[_Portal, S], T]
) -> Callable[Concatenate[_Blocking[A], P], T]:
    """Return the blocking form of a method; `face` wraps its result in a blocking class."""

    @wraps(method)
    def called(self: _Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with _own_name(self, method):
            work = method(self._asynchronous, *args, **kwargs)
        return face(self._portal, self._portal.call(work))

    return called


def _iterate(
    method: Callable[Concatenate[A, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[_Blocking[A], P], Generator[T, None, None]]:
    """Return the blocking form of an asynchronous generator, with its arguments and docstring."""

    @wraps(method)
    def called(self: _Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        with _own_name(self, method):
            source = method(self._asynchronous, *args, **kwargs)
        return self._portal.iterate(source)

    return called


def _like(
    method: Callable[Concatenate[A, P], object],
) -> Callable[[Callable[Concatenate[S, ...], T]], Callable[Concatenate[S, P], T]]:
    """Return a decorator that gives a function the arguments and the docstring of `method`."""

    def copied(function: Callable[Concatenate[S, ...], T]) -> Callable[Concatenate[S, P], T]:
        return cast("Callable[Concatenate[S, P], T]", update_wrapper(function, method))

    return copied


class _Handle(_Blocking[H]):
    """Base of the handles of jobs and sessions."""

    def __repr__(self) -> str:
        return repr(self._asynchronous).replace(type(self._asynchronous).__name__, type(self).__name__)

    @property
    def id(self) -> str:
        return self._asynchronous.id


class JobHandle(_Handle[AsyncJobHandle]):
    """A handle to one job; see `AsyncJobHandle`."""

    refresh = _call(AsyncJobHandle.refresh)
    pause = _call(AsyncJobHandle.pause)
    resume = _call(AsyncJobHandle.resume)
    cancel = _call(AsyncJobHandle.cancel)
    delete = _call(AsyncJobHandle.delete)
    events = _iterate(AsyncJobHandle.events)
    wait = _call(AsyncJobHandle.wait)

    @property
    def info(self) -> Job:
        return self._asynchronous.info


class TrainingSession(_Handle[AsyncTrainingSession], _Closing[AsyncTrainingSession]):
    """A training session; see `AsyncTrainingSession`. Close it, or use it as `with`."""

    forward_backward = _call(AsyncTrainingSession.forward_backward)
    forward = _call(AsyncTrainingSession.forward)
    optim_step = _call(AsyncTrainingSession.optim_step)
    save = _call(AsyncTrainingSession.save)
    publish = _call(AsyncTrainingSession.publish)
    close = _call(AsyncTrainingSession.close)

    @property
    def info(self) -> Session:
        return self._asynchronous.info


class _QuietClient(AsyncClient):
    """An `AsyncClient` that does not warn of truncated rows. `Client` warns, since only its thread knows the caller's
    line."""

    def _warn_of_cut(self, job: Job) -> None:
        pass


class Client(_Closing[AsyncClient]):
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
        client = _QuietClient(base_url, api_key=api_key, retry=retry, read_timeout=read_timeout, transport=transport)
        super().__init__(_Portal(client.close), client)

    @_like(AsyncClient.close)
    def close(self) -> None:
        self._portal.close()

    @_like(AsyncClient.finetune)
    def finetune(
        self,
        adapter: str,
        data: Iterable[Mapping[str, Any]] | Path | str | None = None,
        *,
        validation: Iterable[Mapping[str, Any]] | Path | str | None = None,
        on_preparing: Callable[[Preparing], None] | None = None,
        **settings: Any,  # noqa: ANN401 - the rest of the method's arguments
    ) -> JobHandle:
        # Read the rows on this thread, since the iterable may use the client, as `on_preparing` may.
        rows, held = (
            given if given is None or isinstance(given, str | Path) else rows_of(given, field)
            for given, field in ((data, "data"), (validation, "validation"))
        )

        def work(show: Callable[[Preparing], None]) -> Coroutine[Any, Any, AsyncJobHandle]:
            with _own_name(self, AsyncClient.finetune):
                return self._asynchronous.finetune(adapter, rows, validation=held, on_preparing=show, **settings)

        handle = self._portal.call_and_show(work, on_preparing or (lambda _: None))
        if (warning := cut_warning(handle.info)) is not None:
            warnings.warn(warning, stacklevel=2)
        return JobHandle(self._portal, handle)

    learn = _call_for(AsyncClient.learn, JobHandle)
    job = _call_for(AsyncClient.job, JobHandle)
    training_session = _call_for(AsyncClient.training_session, TrainingSession)
    generate = _call(AsyncClient.generate)
    stream = _iterate(AsyncClient.stream)
    jobs = _call(AsyncClient.jobs)
    adapters = _call(AsyncClient.adapters)
    adapter = _call(AsyncClient.adapter)
    import_adapter = _call(AsyncClient.import_adapter)
    download_adapter = _call(AsyncClient.download_adapter)
    delete_adapter = _call(AsyncClient.delete_adapter)
    rollback_adapter = _call(AsyncClient.rollback_adapter)
    prefetch_adapter = _call(AsyncClient.prefetch_adapter)
    update_adapter = _call(AsyncClient.update_adapter)
    aliases = _call(AsyncClient.aliases)
    set_alias = _call(AsyncClient.set_alias)
    promote_alias = _call(AsyncClient.promote_alias)
    rollback_alias = _call(AsyncClient.rollback_alias)
    delete_alias = _call(AsyncClient.delete_alias)
    convert_adapter = _call(AsyncClient.convert_adapter)
    health = _call(AsyncClient.health)
    wait_ready = _call(AsyncClient.wait_ready)
    metrics = _call(AsyncClient.metrics)
    openapi = _call(AsyncClient.openapi)
