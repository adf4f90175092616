"""An engine in this process, with LoRA servers, as the API process uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from coserve.core.health import LoraServerInfo
from coserve.core.link.generation import RequestFailed, Tokens
from coserve.core.link.jobs import JobFailed, JobProgress, JobSucceeded
from coserve.core.link.link import FromEngine, Link, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.core.types import AdapterRef
from coserve.state.folder import DataFolder
from tests.support.finetuning import metrics_of
from tests.support.generation import prompt, request
from tests.support.lora_servers import digests_of


class Engine:
    """The API process's end of an engine."""

    def __init__(self, link: Link[ToEngine, FromEngine], running: asyncio.Task[None], data: Path | None = None) -> None:
        """`data`: the engine's data folder; its requests then have the digests of the adapters' files."""
        self._data = data
        self._link, self._running, self._requests = link, running, 0
        self._jobs = list[FromEngine]()
        """What jobs have told."""
        self.troubles = set[str]()
        """All that the engine has told."""

    async def _receive(self) -> FromEngine:
        """Raises what ended the engine."""
        message = asyncio.create_task(self._link.receive())
        await asyncio.wait({message, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            self._running.result()
        if isinstance(found := await message, JobProgress | JobSucceeded | JobFailed):
            self._jobs.append(found)
        if isinstance(found, EngineStats):
            self.troubles.update(found.troubles)
        return found

    async def losses(self) -> list[float]:
        """Wait for the end of the job, and return the losses of its steps."""
        while not self._jobs or isinstance(self._jobs[-1], JobProgress):
            await self._receive()
        assert isinstance(self._jobs[-1], JobSucceeded), self._jobs[-1]
        return [metrics.loss for metrics in metrics_of(self._jobs)]

    async def tokens(self, ref: AdapterRef | None, at: Callable[[int], None] = lambda _: None) -> list[int]:
        """The tokens of a request; `at` is called with the number of tokens so far."""
        self._requests += 1
        digests = None
        if self._data is not None and ref is not None:
            digests = digests_of(DataFolder(self._data).adapter(ref))
        self._link.send(replace(request(str(self._requests), prompt(6), ref=ref), digests=digests))
        found = list[int]()
        while True:
            message = await self._receive()
            assert not isinstance(message, RequestFailed), message
            if isinstance(message, Tokens):
                found.extend(message.tokens)
                if message.finished:
                    return found
                at(len(found))

    async def server(self, ready: Callable[[LoraServerInfo], bool]) -> LoraServerInfo:
        """Wait until the server is so."""
        while True:
            message = await self._receive()
            if isinstance(message, EngineStats) and ready(message.lora_servers[0]):
                return message.lora_servers[0]
