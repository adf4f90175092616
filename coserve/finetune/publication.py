"""Publish what a job learned as a version of its adapter."""

from __future__ import annotations

import torch

from coserve.adapter_store.files import save_adapter
from coserve.adapter_store.store import AdapterStore
from coserve.errors import NonFiniteLoss, StorageError, StorageFull
from coserve.finetune.job import TrainingJob
from coserve.finetune.lora_tensors import cast, named_tensors
from coserve.link import JobSucceeded, JobWaiting
from coserve.model.base import Base
from coserve.state.durable import disk_errors, replace_dir
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.types import AdapterRef


def publish(job: TrainingJob, base: Base, folder: DataFolder, store: AdapterStore) -> JobSucceeded | JobWaiting:
    """Write the adapter's files durably, then make the version available in memory.

    `JobWaiting` where the disk refuses the files: call again later. Raises `NonFiniteLoss` for NaN or infinite weights.
    """
    spec, weights = job.loop.spec, job.final_weights()
    try:
        if not all(bool(torch.isfinite(tensor).all()) for _, tensor in named_tensors(weights)):
            raise NonFiniteLoss("the adapter's weights are not finite; try a lower learning rate")
        ref = AdapterRef(spec.adapter, spec.version)
        with replace_dir(folder.adapter(ref), point="adapter") as beside:
            save_adapter(beside, weights, base.spec)
        with disk_errors():
            failpoint("adapter.publish")
    except StorageError as error:
        what = "space" if isinstance(error, StorageFull) else "the disk"
        return JobWaiting(id=spec.id, message=f"waiting for {what}: {error.message}")
    store.publish(ref, cast(weights, base.dtype))
    return JobSucceeded(id=spec.id, ref=ref)
