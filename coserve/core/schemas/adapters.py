"""Adapters: imports, versions, conversions."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from coserve.core.limits import MAX_BLOCKS, MAX_RANK, MAX_ROWS, LocalPath
from coserve.core.names import MAX_VERSION, AdapterName
from coserve.core.schemas.jobs import ROWS
from coserve.core.types import TrainingRequest, Wire


class ImportRequest(Wire, frozen=True, omit_defaults=True):
    """`POST /adapters`: as a JSON body with `path`, or as multipart/form-data with a part `settings` (this, as JSON,
    without `path`) and then one part `file` for each of adapter_config.json and adapter_model.safetensors.
    """

    name: AdapterName
    path: LocalPath | None = None
    """A folder under the daemon's `data_root`."""


class Adapter(Wire, frozen=True):
    """One version of an adapter."""

    id: str
    version: int
    ref: str
    """`id@version`."""
    rank: int
    """The largest, where ranks differ between sites; over all blocks, with BD-LoRA."""
    alpha: float
    targets: list[str]
    base: str
    base_fingerprint: str
    source: str
    """`job:<id>`, `import` or `convert:<name@version>`."""
    created_at: float
    bytes: int
    sha256: str
    resident: bool
    """In memory now."""
    versions: list[int] | None = None
    """All versions, ascending; null in lists."""
    current: bool = True
    """The name without a version means this one."""
    newest: int | None = None
    """The newest version of the name; after a rollback the name means an older one."""
    bd_blocks: int = 1
    """Diagonal blocks of a BD-LoRA adapter; 1: plain LoRA."""


class RollbackRequest(Wire, frozen=True):
    """`POST /adapters/{id}/rollback`: the name means this version until a newer one is published."""

    version: Annotated[int, Meta(ge=1, le=MAX_VERSION)]


class Distillation(Wire, frozen=True, omit_defaults=True):
    """A job that trains a converted adapter toward the outputs of its source, at the targets of these rows."""

    data: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_ROWS, description=ROWS)]
    training: TrainingRequest = TrainingRequest()
    """With `validation_split` the job's metrics have the output error before and after; with `early_stopping_patience`
    too, the job publishes the best weights that it has measured, those before its first step included."""


class ConvertRequest(Wire, frozen=True, omit_defaults=True):
    """`POST /adapters/{id}/convert`: from LoRA to BD-LoRA, back, to other blocks or to another rank, by truncated
    SVD."""

    bd_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    """Diagonal blocks of the new adapter; 1: plain LoRA."""
    rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] | None = None
    """Of all blocks together. None: the smallest one whose error is at most `max_error`."""
    max_error: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Bound of the error; with `rank` too, a larger error is refused. None: 0.05, and no bound for `rank`."""
    name: AdapterName | None = None
    """Of the new adapter. None: `<name>-bd<bd_blocks>`, or `<name>-lora` for one block."""
    distill: Distillation | None = None
    """Then submit this job. If it is refused, the converted adapter is deleted again."""


class ConvertedAdapter(Wire, frozen=True):
    """An error is the Frobenius norm of what the update (B times A) lost, divided by that of the whole update."""

    adapter: Adapter
    rank: int
    error: float
    """Of all sites together."""
    site_errors: dict[str, float]
    max_error: float
    smallest_rank: int
    """The smallest rank whose error is at most `max_error`."""
    errors: dict[int, float]
    """The error of all sites at other ranks."""
    job: str | None = None
    """The id of the distillation's job; it publishes the next version."""


class AdapterList(Wire, frozen=True):
    """The version that each name means, by name; the next page is `?after=<id of the last one>`."""

    data: list[Adapter]
    has_more: bool


class DeletedAdapter(Wire, frozen=True):
    id: str
    versions: list[int]
    current_ref: str | None = None
    """The version that the name means from now on (`"pirate@1"`); None: no version is left."""
