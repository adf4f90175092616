"""Publication of a job's weights: at its end as an adapter version, before that as temporary snapshots that samples are
generated from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coserve.core.errors import JobOutOfMemory, RequestOutOfMemory, StorageError, StorageFull
from coserve.core.link.jobs import JobNote, JobSnapshot, JobSucceeded, JobWaiting
from coserve.core.types import AdapterRef
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.lora_tensors import cast, named_tensors, refuse_non_finite
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.files import save_adapter
from coserve.lora.store.store import AdapterStore
from coserve.lora.store.tensor_writer import OnDemand
from coserve.model.base import Base
from coserve.model.faults import out_of_memory
from coserve.model.lora import LoraWeights
from coserve.state.durable import disk_errors, replace_dir
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.state.registry.missing_samples import without_samples

log = logging.getLogger(__name__)

Published = JobSucceeded | JobWaiting


def publication(
    loop: TrainingLoop, base: Base, folder: DataFolder, store: AdapterStore, final: Callable[[], LoraWeights]
) -> Callable[[], Callable[[], Published]]:
    """Begin to publish the result of a finished job. `final` waits until the weights to publish are on the host.

    Call the returned function on a worker thread: it writes the adapter's files durably. Call its result on the
    event-loop thread: it makes the version available in memory. `JobWaiting`: the disk refused the files; begin again
    later. The thread's part raises `NonFiniteLoss` for NaN or infinite weights.
    """
    id, ref = loop.spec.id, loop.result
    copy = publish_adapter(ref, final, base, folder, store, files=True)

    def write() -> Callable[[], Published]:
        try:
            serve = copy()
        except StorageError as error:
            waiting = waiting_for_disk(id, error)
            return lambda: waiting

        def publish() -> JobSucceeded:
            serve()
            return JobSucceeded(id=id, ref=ref)

        return publish

    return write


def waiting_for_disk(job: str, error: StorageError) -> JobWaiting:
    """The message about a publication that the disk refused."""
    what = "space" if isinstance(error, StorageFull) else "the disk"
    return JobWaiting(id=job, message=f"waiting for {what}: {error.message}")


class JobSnapshots:
    """Snapshots of the job's weights. At most one is copied at a time, and not together with a checkpoint."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._taken = 0
        """Step of the last snapshot."""

    @property
    def due(self) -> bool:
        """Whether the last finished step, or the end, needs samples and no snapshot was attempted."""
        loop, progress, training = self._loop, self._loop.progress, self._loop.spec.training
        wanted = training.sample_prompts or (loop.spec.evaluated and loop.finished)
        if not wanted or progress.pending is not None or progress.step in (0, self._taken):
            return False
        return progress.step % training.sample_steps == 0 or loop.finished

    def take(self) -> tuple[int, Callable[[], LoraWeights]]:
        """Return the step and a function that copies the weights: `TrainingSession.current_weights`, or if the job has
        finished its `final_weights`."""
        loop = self._loop
        self._taken = loop.progress.step
        return self._taken, loop.session.final_weights() if loop.finished else loop.session.current_weights()


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that has begun."""

    ref: AdapterRef
    step: int
    """Optimizer step of the job."""
    copy: Callable[[], Callable[[], JobSnapshot | JobNote]]
    """Call it on a worker thread, and its result on the event-loop thread."""
    required: bool
    """See `snapshot`."""


def snapshot_without_memory(job: str, step: int, *, required: bool) -> JobNote:
    """Return the message about a snapshot for which there was no host memory. Raises `JobOutOfMemory` for one that is
    `required`: see `snapshot`."""
    if required:
        raise JobOutOfMemory("no host memory for the copy of the adapter that is evaluated before it is published")
    return JobNote(id=job, message=without_samples(step, "no host memory for a copy of the adapter"))


def snapshot(
    id: str,
    step: int,
    ref: AdapterRef,
    weights: Callable[[], LoraWeights],
    base: Base,
    store: AdapterStore,
    *,
    final: bool = False,
    required: bool = False,
) -> Callable[[], Callable[[], JobSnapshot | JobNote]]:
    """Make the weights of job `id` after `step` available to requests, in memory only. `weights` waits until they are
    on the host. `required`: the adapter may not be published before requests have used it.

    Call the returned function on a worker thread, and its result on the event-loop thread. `JobNote`: there was no
    memory. If it is `required`, the function raises `JobOutOfMemory` instead.
    """

    def copy() -> Callable[[], JobSnapshot | JobNote]:
        served = served_copy(weights(), base, store)
        if served is None:
            note = snapshot_without_memory(id, step, required=required)
            return lambda: note

        def publish() -> JobSnapshot:
            store.publish(ref, served, temporary=True)
            return JobSnapshot(id=id, step=step, ref=ref, final=final)

        return publish

    return copy


def served_copy(weights: LoraWeights, base: Base, store: AdapterStore) -> LoraWeights | None:
    """Make a host copy in the form that is served; None if there is no memory for it."""

    def read(site: str) -> LoraPair:
        one = LoraWeights(weights.settings, {site: weights.sites[site]})
        return cast(base.served(one), base.dtype).sites[site]

    try:
        sites: Mapping[str, LoraPair] = OnDemand(dict.fromkeys(weights.sites), read)
        if weights.settings.use_dora:  # its norms read the base's weights: once
            sites = dict(sites)
        return store.host_copy(LoraWeights(weights.settings, sites))
    except Exception as error:  # any kind: lack of memory has several
        if not out_of_memory(error):
            raise
        return None


def publish_adapter(
    ref: AdapterRef,
    weights: Callable[[], LoraWeights],
    base: Base,
    folder: DataFolder,
    store: AdapterStore,
    *,
    files: bool,
) -> Callable[[], Callable[[], None]]:
    """Make weights available to requests. `files`: also write them durably; False: they stay in memory until they are
    dropped. `weights` waits until they are on the host.

    Call the returned function on a worker thread, and its result on the event-loop thread. The thread's part raises
    `NonFiniteLoss`, `RequestOutOfMemory`, `StorageError`.
    """

    def copy() -> Callable[[], None]:
        own = weights()
        refuse_non_finite((tensor for _, tensor in named_tensors(own)), base.dtype)
        if files:
            write_files(ref, own, base, folder)
        served = served_copy(own, base, store)
        if served is None and not files:
            raise RequestOutOfMemory("no host memory for a copy of the adapter")
        if served is None:
            log.warning("adapter %s: no host memory for a copy of it: the first request reads the files", ref)

        def publish() -> None:
            if served is not None:
                store.publish(ref, served, temporary=not files)

        return publish

    return copy


def write_files(ref: AdapterRef, weights: LoraWeights, base: Base, folder: DataFolder) -> None:
    """Write the adapter's PEFT files durably. Raises `StorageError`."""
    with replace_dir(folder.adapter(ref), point="adapter") as target:
        save_adapter(target, weights, base.spec)
    with disk_errors():
        failpoint("adapter.publish")
