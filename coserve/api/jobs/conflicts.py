"""Policy for several jobs of one adapter: the later one waits for the earlier one, forks or is refused. Pure except for
registry reads."""

from __future__ import annotations

from coserve.core.errors import AdapterBusy
from coserve.core.names import split_ref
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.core.training.jobs import JobSpec
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry


def serialised(request: FinetuneRequest) -> bool:
    """Return whether the job continues from whatever its adapter's earlier jobs publish; a `continue_from` with a
    version names the source instead."""
    return (
        request.on_conflict == "wait"
        and request.continue_from is not None
        and split_ref(request.continue_from) == (request.adapter, None)
    )


def last_job(registry: Registry, adapter: str) -> JobRecord | None:
    """Return the last unfinished job that will publish a version of `adapter`."""
    return next((job for job in reversed(registry.unfinished()) if job.spec.adapter == adapter), None)


def refuse_conflict(registry: Registry, request: FinetuneRequest) -> None:
    """Raise `AdapterBusy` if an unfinished job trains the request's adapter and the request asks to be refused then."""
    if request.on_conflict == "refuse" and (earlier := last_job(registry, request.adapter)) is not None:
        raise AdapterBusy(
            f"job {earlier.spec.id} trains {request.adapter!r} already and is {earlier.state}; "
            'with on_conflict "wait" and continue_from this job continues from what it publishes',
            field="adapter",
        )


def fork_notes(registry: Registry, job: JobSpec) -> tuple[str, ...]:
    """Return a note for a job that runs concurrently with an unfinished job of its adapter."""
    name = job.adapter
    if (earlier := last_job(registry, name)) is None:
        return ()
    cartridge = bool(job.prefix or earlier.spec.prefix)
    further = f'; to continue from it, set continue_from to {name!r} and leave on_conflict at "wait"'
    note = (
        f"job {earlier.spec.id} trains {name!r} too and is to publish version {earlier.spec.version}: this job does "
        "not continue from that version, and the version that this job publishes lacks what it learns"
        f"{'' if cartridge else further}"
    )
    return (note,)


def waiting_text(job: JobRecord, *, paused: bool = False) -> str:
    """Return why a job waits for another one. `paused`: whether the job that it waits for is paused."""
    what = ", which is paused until it is resumed," if paused else ","
    return f"waits for job {job.after}{what} and continues from the version that it publishes"
