"""An engine without torch: it says what its script says, and keeps what it was told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors.numpy import save_file

from coserve.core.gpu_memory import MemoryModel, PoolShape
from coserve.core.link import jobs
from coserve.core.link.engine import EngineReady, EngineStopped, Shutdown
from coserve.core.link.generation import Admitted, CancelRequest, Generate, RequestFailed, Tokens
from coserve.core.link.link import FromEngine, PeerLost, ToEngine
from coserve.core.link.stats import AllocatorStats, EngineStats, StepCounts
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.training.jobs import JobSpec
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import AdapterRef, BaseSpec, FinishReason, LoraSettings, SiteSpec
from coserve.lora.files.peft import adapter_config
from coserve.state.folder import DataFolder
from tests.support.local_link import LocalLink
from tests.support.records import make_base_spec, make_metrics

Kind = TypeVar("Kind")

CONTEXT = 128
SITE = "model.layers.0.self_attn.q_proj"


def make_base(vocab: int, eos: tuple[int, ...] = (0,)) -> BaseSpec:
    """A base with one site of 8 by 8."""
    return make_base_spec(
        {SITE: SiteSpec(8, 8, 0)},
        name="fake",
        fingerprint="f" * 16,
        family="fake",
        vocab=vocab,
        context=CONTEXT,
        eos_token_ids=eos,
    )


def write_peft(folder: Path, base: BaseSpec, *, rank: int = 2, value: float = 0.0) -> None:
    """Valid PEFT files of an adapter whose tensors are all `value`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = adapter_config(LoraSettings(r=rank), base, [SITE])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{SITE}.lora_A.weight": np.full((rank, 8), value, np.float32),
        f"base_model.model.{SITE}.lora_B.weight": np.full((8, rank), value, np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def metrics(step: int, total: int) -> StepMetrics:
    return make_metrics(step, total, 3.0 / step, seconds=0.5)


def make_stats(**changes: Any) -> EngineStats:
    """Gauges, with a test's own values for some."""
    stats = EngineStats(
        waiting=0,
        running=0,
        jobs=0,
        pages_used=1,
        pages_total=4,
        pages_adapters=3,
        graphs_missing=4,
        allocator=AllocatorStats(peak=900, allocs=4),
        preemptions=2,
        step_adapters=7,
        prefix_queries=50,
        prefix_hits=30,
        resident=(),
        serve_seconds=1.5,
        train_seconds=2.5,
        steps=(
            StepCounts("decode", overlapped=True, count=20, seconds=0.5),
            StepCounts("prefill", overlapped=False, count=3, seconds=0.25),
        ),
    )
    return msgspec.structs.replace(stats, **changes)


class FakeEngine:
    """`reply` gives the tokens for a request; `hold_requests`, `hold_jobs`: stop before the first token, or step."""

    memory: MemoryModel | None = None

    def __init__(
        self,
        link: LocalLink[FromEngine, ToEngine],
        base: BaseSpec,
        folder: DataFolder,
        reply: Callable[[Generate], Iterable[int]],
    ) -> None:
        self.link, self.base, self.folder, self.reply = link, base, folder, reply
        self.told: list[ToEngine] = []
        self.news = asyncio.Event()
        self.fail_requests: RequestFailed | None = None
        self.fail_jobs: jobs.JobFailed | None = None
        self.go_requests, self.go_jobs = asyncio.Event(), asyncio.Event()
        self.go_requests.set()
        self.go_jobs.set()
        self.obeys = True
        """False: it hears, and does nothing."""
        self.stall_after: int | None = None
        """Say so many tokens of a request, then nothing more."""
        self.cached = 0
        """Tokens of each prompt that its prefix cache has."""
        self.write_adapter: Callable[[Path, BaseSpec], None] = write_peft
        self.steps = 3
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._specs: dict[str, JobSpec] = {}
        self._main = asyncio.create_task(self._run())

    @property
    def ready(self) -> EngineReady:
        return EngineReady(
            spec=self.base,
            kv_tokens=1024,
            pool=PoolShape(64, 1 << 20, 16),
            lora_backend="reference",
            memory=self.memory,
            notes=("a fake",),
            host_adapter_limit=1000,
        )

    def heard(self, kind: type[Kind]) -> list[Kind]:
        """The messages of a kind that have come."""
        return [message for message in self.told if isinstance(message, kind)]

    async def saw(self, kind: type[Kind], count: int = 1) -> list[Kind]:
        """Wait until `count` messages of a kind have come."""
        while len(found := self.heard(kind)) < count:
            self.news.clear()
            await self.news.wait()
        return found

    async def die(self) -> None:
        """As if killed: nothing more is said or heard."""
        for task in (self._main, *self._tasks.values()):
            task.cancel()
        await asyncio.gather(self._main, *self._tasks.values(), return_exceptions=True)
        await self.link.close()

    async def _run(self) -> None:
        with suppress(PeerLost):
            while True:
                message = await self.link.receive()
                self.told.append(message)
                self.news.set()
                if self.obeys:
                    self.handle(message)

    def handle(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._tasks[message.id] = asyncio.create_task(self.answer(message))
            case CancelRequest(id=id):
                self._tasks[id].cancel()
            case jobs.StartJob(spec=spec, paused=paused):
                self._specs[spec.id] = spec
                if not paused:
                    self._tasks[spec.id] = asyncio.create_task(self._train(spec))
            case jobs.PauseJob(id=id):
                self._tasks[id].cancel()
                self.link.send(jobs.JobPaused(id=id))
            case jobs.ResumeJob(id=id):
                self._tasks[id] = asyncio.create_task(self._train(self._specs[id]))
            case jobs.CancelJob(id=id):
                if id in self._tasks:
                    self._tasks[id].cancel()
                self.link.send(jobs.JobCancelled(id=id))
            case Shutdown():
                self.link.send(EngineStopped())

    async def answer(self, request: Generate) -> None:
        await self.go_requests.wait()
        if self.fail_requests is not None:
            failed = self.fail_requests
            self.link.send(msgspec.structs.replace(failed, id=request.id))
            return
        self.link.send(Admitted(id=request.id, at=time.monotonic(), cached=self.cached))
        if request.sampling.prompt_logprobs is not None:
            scores = tuple(TokenLogprob(-0.25, ((token, -0.25),)) for token in request.prompt[1:])
            for some in (scores[:1], scores[1:]):
                self.link.send(Tokens(id=request.id, tokens=(), prompt_logprobs=PackedLogprobs.of(some)))
            if request.sampling.max_tokens == 0:
                self.link.send(Tokens(id=request.id, tokens=(), finished=FinishReason.LENGTH))
                return
        tokens = list(self.reply(request))
        stops = set(request.sampling.stop_token_ids) | (set() if request.sampling.ignore_eos else {0})
        for index, token in enumerate(tokens):
            last = index + 1 == min(len(tokens), request.sampling.max_tokens)
            finished = FinishReason.STOP if token in stops else FinishReason.LENGTH if last else None
            logprobs = (TokenLogprob(-0.5, ((token, -0.5),)),) if request.sampling.logprobs is not None else ()
            packed = PackedLogprobs.of(logprobs)
            self.link.send(Tokens(id=request.id, tokens=(token,), logprobs=packed, finished=finished))
            await asyncio.sleep(0)
            if finished is not None:
                return
            if index + 1 == self.stall_after:
                await asyncio.Event().wait()

    async def _train(self, spec: JobSpec) -> None:
        self.link.send(jobs.JobStarted(id=spec.id, total_steps=self.steps))
        await self.go_jobs.wait()
        if self.fail_jobs is not None:
            self.link.send(jobs.JobFailed(id=spec.id, code=self.fail_jobs.code, message=self.fail_jobs.message))
            return
        for step in range(1, self.steps + 1):
            self.link.send(jobs.JobProgress(id=spec.id, metrics=metrics(step, self.steps)))
            await asyncio.sleep(0)
        self.link.send(jobs.JobCheckpoint(id=spec.id, step=self.steps))
        ref = AdapterRef(spec.adapter, spec.version)
        self.write_adapter(self.folder.adapter(ref), self.base)
        self.link.send(jobs.JobSucceeded(id=spec.id, ref=ref))

    def stats(self, *, waits: tuple[float, float] = (0.0, 0.0), **changes: Any) -> None:
        """Report gauges. `waits`: of the oldest request, and of training."""
        self.link.send(make_stats(request_waits=waits[0], training_waits=waits[1], **changes))
