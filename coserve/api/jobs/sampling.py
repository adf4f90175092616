"""Samples of jobs in training: requests of the class batch, for the adapter as it is in the engine's memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from coserve.api.generation.full_response import collect_native
from coserve.api.generation.in_flight import InFlightRequests
from coserve.api.jobs.recorder import JobSample, Progress
from coserve.api.node import Node
from coserve.core.access.principal import Principal, Scope, act_as
from coserve.core.cancellation import cancel_all
from coserve.core.errors import CoserveError, EngineUnavailable
from coserve.core.link.jobs import JobNote, JobSnapshot, SnapshotDone
from coserve.core.messages import ChatMessage
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.schemas.jobs import Sample
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import TrainingRequest
from coserve.state.registry.missing_samples import without_samples
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry
from coserve.state.thread import RegistryThread

log = logging.getLogger(__name__)


class JobSampler:
    """Generates the samples of each snapshot that the engine announces, except those in the registry already, then
    tells the engine that the snapshot is not needed any more. A sample that fails becomes a note of its job, which goes
    on."""

    def __init__(
        self,
        node: Node,
        generation: InFlightRequests,
        record: Callable[[Progress], None],
        evaluate: Callable[[JobRecord, JobSnapshot], Awaitable[bool]],
    ) -> None:
        """`record` gets each sample and note; it must return at once. `evaluate` is called with an evaluated job
        and its final snapshot; it returns False like `_sample`."""
        self._registry, self._engine, self._generation, self._record = node.registry, node.engine, generation, record
        self._evaluate = evaluate
        self._tasks: dict[asyncio.Task[bool], str] = {}
        """Tasks that use a snapshot, with their jobs."""

    def begin(self, snapshot: JobSnapshot) -> None:
        task, engine = asyncio.create_task(self._sample(snapshot)), self._engine.starts
        self._tasks[task] = snapshot.id

        def ended(task: asyncio.Task[bool]) -> None:  # a callback: the task may be cancelled before it begins
            del self._tasks[task]
            if (task.cancelled() or task.result()) and engine == self._engine.starts:  # a later engine does not have it
                self._engine.offer(SnapshotDone(id=snapshot.id, ref=snapshot.ref))

        task.add_done_callback(ended)

    def cancel(self, job: str) -> None:
        """Cancel the job's unfinished samples."""
        for task, own in self._tasks.items():
            if own == job:
                task.cancel()

    async def close(self) -> None:
        """End all samples in flight."""
        await cancel_all(self._tasks)

    async def _sample(self, snapshot: JobSnapshot) -> bool:
        """Generate the samples of a snapshot. Returns False if the engine or the daemon ends first: the job, which
        resumes later, must not end without them."""
        try:
            await act_as_owner(self._registry, snapshot.id)
            record, done = await self._registry(lambda registry: _found(registry, snapshot))
            training = record.spec.training
            wanted = [index for index in range(len(training.sample_prompts)) if index not in done]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._sample_prompt(snapshot, index, record.spec)) for index in wanted]
            sampled = all(task.result() for task in tasks)
            if sampled and snapshot.final and record.spec.evaluated:
                return await self._evaluate(record, snapshot)
            return sampled
        except CoserveError as error:
            self._record(JobNote(id=snapshot.id, message=without_samples(snapshot.step, error.message)))
        except Exception:  # our own fault in one sample: the job goes on without it
            log.exception("job %s: internal error; no samples at step %d", snapshot.id, snapshot.step)
        return True

    async def _sample_prompt(self, snapshot: JobSnapshot, index: int, job: JobSpec) -> bool:
        """Generate one sample. Returns False as `_sample` does."""
        request = sample_request(job.training, job.training.sample_prompts[index])
        try:
            response = await collect_native(request, self._generation.stream(request, snapshot=snapshot.ref))
        except EngineUnavailable:
            return False
        except CoserveError as error:
            # The engine names the snapshot by a ref of its own; the user knows the job's adapter name.
            why = error.message.replace(str(snapshot.ref), job.adapter)
            what = without_samples(snapshot.step, why, index)
            self._record(JobNote(id=snapshot.id, message=what))
            return True
        (choice,) = response.choices
        sample = Sample(step=snapshot.step, prompt=index, text=choice.text, finish_reason=choice.finish_reason)
        self._record(JobSample(snapshot.id, sample))
        return True


async def act_as_owner(registry: RegistryThread, job: str) -> None:
    """Let the running task act for the project of a job. Raises `JobNotFound`."""
    project = await registry(lambda registry: registry.project_of_job(job))
    act_as(Principal(project, frozenset({Scope.TRAIN, Scope.GENERATE})))


def sample_request(training: TrainingRequest, prompt: str | tuple[ChatMessage, ...]) -> GenerateRequest:
    """Return the request for one sample: like one of `POST /generate`, without an adapter."""
    return GenerateRequest(
        prompt=prompt if isinstance(prompt, str) else None,
        messages=None if isinstance(prompt, str) else list(prompt),
        max_tokens=training.sample_max_tokens,
        temperature=training.sample_temperature,
        seed=training.seed,
        slo_class="batch",
    )


def _found(registry: Registry, snapshot: JobSnapshot) -> tuple[JobRecord, frozenset[int]]:
    record = registry.job(snapshot.id)
    return record, registry.sampled(record, snapshot.step)
