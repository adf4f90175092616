"""Schemas of adapters: imports, versions, conversions."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from coserve.core.limits import MAX_BLOCKS, MAX_LIFE, MAX_RANK, MAX_ROWS, MAX_TAGS, LocalPath
from coserve.core.names import MAX_VERSION, AdapterName, AdapterRefText, Name
from coserve.core.schemas.jobs import ROWS
from coserve.core.training.settings import TrainingRequest
from coserve.core.types import Wire


class ImportRequest(Wire, frozen=True, omit_defaults=True):
    """Body of `POST /adapters`: JSON with `path`, or multipart/form-data with a part `settings` (this schema as JSON,
    without `path`) followed by a part `file` for each of adapter_config.json and adapter_model.safetensors, or for one
    archive of them (.tar, .tar.gz, .tgz, .zip).
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
    """The LoRA rank: the largest if it differs between sites, the total over all blocks with BD-LoRA. For a cartridge:
    its number of tokens."""
    alpha: float
    targets: list[str]
    base: str
    base_fingerprint: str
    source: str
    """`job:<id>`, `import`, `load` (by `/v1/load_lora_adapter`) or `convert:<name@version>`."""
    created_at: float
    bytes: int
    sha256: str
    resident: bool
    """Whether the version is in memory now."""
    versions: list[int] | None = None
    """All versions, ascending; null in lists."""
    current: bool = True
    """Whether the name without a version means this one."""
    newest: int | None = None
    """The newest version of the name; after a rollback the name means an older one."""
    bd_blocks: int = 1
    """Diagonal blocks of a BD-LoRA adapter; 1: plain LoRA."""
    cartridge: bool = False
    """Whether it is a trained KV prefix of `rank` tokens instead of LoRA (PEFT's `cartridge`)."""
    prefix_tokens: int = 0
    """Tokens of its KV prefix, alone or beside LoRA; 0: none."""
    parent: str | None = None
    """The version (`name@version`) that the job continued, or that was converted."""
    tags: tuple[str, ...] = ()
    """Tags of the name."""
    expires_at: float | None = None
    """When the name is deleted; null: never."""
    pinned: bool = False
    """Whether the version stays in host memory, and a cartridge's full pages in the KV cache."""
    aliases: tuple[str, ...] = ()
    """Aliases that send requests to the version, also as their canary."""
    corpus_digest: str | None = None
    """SHA-256 (hex) of the tokenised corpus on which the job trained it."""


class AdapterUpdate(Wire, frozen=True, omit_defaults=True):
    """Body of `PATCH /adapters/{id}`: changes the fields that are given."""

    tags: Annotated[tuple[Name, ...], Meta(max_length=MAX_TAGS)] | None = None
    """New tags of the name; they replace the old ones. Tags and `ttl` apply to all versions, so give a name without a
    version."""
    ttl: Annotated[float, Meta(ge=0, le=MAX_LIFE)] | None = None
    """Seconds from now after which the name is deleted, with all its versions, once nothing needs them; 0: never. At
    most ten years."""
    pinned: bool | None = None
    """Whether this version (the current one by default) stays in host memory, beyond the budget of idle adapters, and a
    cartridge's full pages in the KV cache."""


class AliasRequest(Wire, frozen=True, omit_defaults=True):
    """Body of `PUT /aliases/{id}`. A name without a version means the version that it has now."""

    target: AdapterRefText
    canary: AdapterRefText | None = None
    """Another version, which gets `weight` of the requests."""
    weight: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Alias(Wire, frozen=True):
    """A name that requests may use for a version of an adapter. A hash of each request's id decides whether it gets the
    canary."""

    name: str
    target: str
    """`name@version`."""
    updated_at: float
    canary: str | None = None
    weight: float = 0.0
    """Fraction of the requests that get the canary."""
    previous: str | None = None
    """The target before, to which a rollback returns."""


class AliasList(Wire, frozen=True):
    data: list[Alias]


class RollbackRequest(Wire, frozen=True):
    """Body of `POST /adapters/{id}/rollback`: the name means this version until a newer one is published."""

    version: Annotated[int, Meta(ge=1, le=MAX_VERSION)]


class Distillation(Wire, frozen=True, omit_defaults=True):
    """A job that trains a converted adapter toward its source's outputs, at the targets of these rows."""

    data: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_ROWS, description=ROWS)]
    training: TrainingRequest = TrainingRequest()
    """With `validation_split` the job's metrics have the output error before and after training; with
    `early_stopping_patience` as well, the job publishes the best weights measured, which may be those before its first
    step."""


class ConvertRequest(Wire, frozen=True, omit_defaults=True):
    """Body of `POST /adapters/{id}/convert`: convert between LoRA and BD-LoRA, or to other blocks or another LoRA rank,
    by truncated SVD."""

    bd_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    """Diagonal blocks of the new adapter; 1: plain LoRA."""
    rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] | None = None
    """Total LoRA rank of all blocks. None: the smallest one whose error is at most `max_error`."""
    max_error: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Maximum error; a larger one with the given `rank` is refused. None: 0.05 if the rank is chosen, no limit if it is
    given."""
    name: AdapterName | None = None
    """Name of the new adapter. None: `<name>-bd<bd_blocks>`, or `<name>-lora` for one block."""
    distill: Distillation | None = None
    """A job to submit after the conversion. If it is refused, the converted adapter is deleted."""


class ConversionReport(Wire, frozen=True):
    """Errors that a conversion introduced: see `ConvertedAdapter`."""

    rank: int
    error: float
    """Error over all sites."""
    site_errors: dict[str, float]
    max_error: float
    smallest_rank: int
    """Smallest LoRA rank whose error is at most `max_error`."""
    errors: dict[int, float]
    """Error over all sites by LoRA rank, for other ranks."""


class ConvertedAdapter(ConversionReport, frozen=True):
    """Result of a conversion. An error is the Frobenius norm of the lost part of the update BA, divided by that of
    BA."""

    adapter: Adapter
    job: str | None = None
    """Id of the distillation job, which publishes the next version."""


class AdapterList(Wire, frozen=True):
    """Adapters by name, each with its current version. The next page is `?after=<id of the last one>`."""

    data: list[Adapter]
    has_more: bool


class DeletedAdapter(Wire, frozen=True):
    id: str
    versions: list[int]
    current_ref: str | None = None
    """The version that the name means from now on (`"pirate@1"`); None: no version is left."""
