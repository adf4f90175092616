"""Data types that all packages share. No torch, no IO.

Structs are sent over HTTP or the link to the engine; they are frozen and refuse unknown fields. Times are seconds
(`float`) on the clock of the process that made them; token ids are `int`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from coserve.core.limits import MAX_NAMES, BlockNames, ModuleName, ModuleNames, NamePattern, TrainedTokens
from coserve.core.names import DECODER, end_of


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of structs that are sent or stored."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message between the API process and the engine."""


class AdapterRef(msgspec.Struct, frozen=True, order=True):
    """One immutable version of one adapter. Each KV page and cached prefix belongs to one version, or to the base."""

    id: str
    version: int

    def __str__(self) -> str:
        return f"{self.id}@{self.version}"


class AdapterDigests(msgspec.Struct, frozen=True):
    """SHA-256 (hex) of an adapter's files, and the alphas resolved from its config, as the registry stores them."""

    weights: str
    config: str = ""
    """Empty for versions registered before this field existed; then it is not checked."""
    alphas: tuple[float, ...] | None = None
    """Alpha of each adapted module, ordered by module name; empty: `lora_alpha` for all. None: not stored (an older
    registration), so the config's patterns are matched when the files are read."""


Halves = Literal["", "concatenated", "interleaved"]


class SiteSpec(msgspec.Struct, frozen=True):
    """One linear module of the base that an adapter may change."""

    in_features: int
    out_features: int
    layer: int
    experts: int = 1
    """Experts of a fused parameter of a mixture of experts, each with these features; 1: a linear module."""
    chosen: int = 1
    """Experts chosen for a token (the router's top-k)."""
    transposed: bool = False
    """Whether the parameter is (experts, in, out) instead of (experts, out, in)."""
    halves: Halves = ""
    """Layout of a fused gate and up in the parameter's outputs; empty: the parameter is no fused gate and up."""
    by_expert: bool = False
    """Expert parallelism: each of several GPUs has some experts whole, instead of a shard of every expert."""
    holders: int = 1
    """GPUs that hold the same outputs: several share a key/value head where a base has fewer of them than GPUs."""


class BaseSpec(Wire, frozen=True):
    """Description of the loaded base, for code that does not hold the model."""

    name: str
    fingerprint: str
    family: str
    dtype: str
    device: str
    layers: int
    hidden: int
    vocab: int
    context: int
    eos_token_ids: tuple[int, ...]
    sites: dict[str, SiteSpec]
    """The linear modules of decoder layers."""
    default_targets: tuple[str, ...]
    """Suffixes of the sites that a new adapter targets by default: all linear sites of a layer."""
    context_note: str = ""
    """Why `context` is less than the model's own maximum; empty if it is not."""
    hub_name: str | None = None
    """NAME or OWNER/NAME on the hub; None: the base is bundled or was read from a folder."""
    experts: dict[str, SiteSpec] = {}
    """The fused parameters of experts that an adapter may change, by name."""
    quantization: str = "none"
    """How the linear modules of the layers are stored: fp8, nf4 or none. The fingerprint is of the unquantised
    weights."""
    ends: dict[str, SiteSpec] = {}
    """The embedding (layer -1, tokens to features) and the head (layer `layers`); empty on several GPUs."""
    tied: bool = False
    """Whether embedding and head are one weight."""
    kv_heads: int = 0
    prefixes: dict[str, SiteSpec] = {}
    """Sizes of each layer's keys and values (`kv_heads` heads) in a cartridge; empty: the base takes no cartridges."""
    streams: int = 1
    """Number of hidden states of a token between layers."""

    @property
    def carried(self) -> int:
        """Numbers of a token that a layer takes from the one below."""
        return self.streams * self.hidden

    def site(self, name: str) -> SiteSpec:
        """Return the sizes of a linear module, experts' parameter, embedding, head, or layer's keys and values."""
        name = name.removesuffix(DECODER)
        return self.sites.get(name) or self.experts.get(name) or self.ends.get(end_of(name)) or self.prefixes[name]


class Slo(Wire, frozen=True):
    """A request's latency targets, in seconds. `e2e`: from arrival to the last token."""

    ttft: float
    tpot: float
    e2e: float | None = None
    batch: bool = False
    """The request's class is `batch`: interactive requests are admitted first. After
    `queues.inference.INTERACTIVE_PER_BATCH` of them, a batch request goes next if its first token is due before
    theirs."""
    shed: bool = False
    """Refuse the request as soon as its first token cannot be on time."""
    shed_e2e: bool = False
    """Refuse the request as soon as its last token cannot be on time."""


SloClass = Literal["interactive", "batch"]
"""Classes of requests. Each has its own latency targets in the settings."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


ALL_LINEAR: Final = "all-linear"
DEFAULT_RANK = 16
"""LoRA rank of a new adapter by default. Memory is profiled with it, and its kernels are compiled first."""


class LoraRequest(Wire, frozen=True):
    """The shape of a new adapter as a user requests it, with PEFT's meanings.

    Some names differ from PEFT's, which are taken, too: `alpha` is `lora_alpha`, `rslora` is `use_rslora`, `dropout` is
    `lora_dropout`, `targets` is `target_modules`, and `init` is `init_lora_weights`. `bd_blocks`, `targets_bd_a` and
    `targets_bd_b` are `use_bdlora`'s `nblocks`, `target_modules_bd_a` and `target_modules_bd_b`.
    """

    r: int = DEFAULT_RANK
    """LoRA rank of a new adapter."""
    alpha: float | None = None
    """The adapter's scale is `alpha / r`. None: `2 * r`."""
    rslora: bool = False
    use_dora: bool = False
    """DoRA (https://arxiv.org/abs/2402.09353): also learn the norm of each row of the adapted weight."""
    dropout: float = 0.0
    targets: ModuleNames | NamePattern | None = None
    """Suffixes of module names (`["q_proj"]`) or whole names, or, as one text, a regular expression of whole names.
    None, or `"all-linear"`, as in PEFT: every linear site of the decoder layers, or none with `target_parameters`."""
    target_parameters: ModuleNames | None = None
    """Suffixes of the names of experts' fused parameters (`"mlp.experts.gate_up_proj"`), as in PEFT: each expert gets a
    LoRA of its own."""
    rank_pattern: Annotated[dict[ModuleName, int], Meta(max_length=MAX_NAMES)] = {}
    alpha_pattern: Annotated[dict[ModuleName, float], Meta(max_length=MAX_NAMES)] = {}
    init: Annotated[str, Meta(max_length=64)] = "default"
    """`default` (Kaiming A, zero B), `gaussian` (normal A / r, zero B) or `orthogonal`."""
    bd_blocks: int = 1
    """BD-LoRA: number of diagonal blocks of B at column-parallel sites (q, k, v, gate, up) and of A at row-parallel
    ones (o, down). It suits tensor parallelism over that many GPUs or any divisor. `r` is the total rank of all blocks.
    1: plain LoRA."""
    targets_bd_a: BlockNames | None = None
    """Substrings of the names of sites with a block-diagonal A. If both lists are None: the row-parallel sites. Other
    sites get plain LoRA."""
    targets_bd_b: BlockNames | None = None
    """Substrings of the names of sites with a block-diagonal B. If both lists are None: the column-parallel sites."""
    trainable_token_indices: TrainedTokens | None = None
    """Tokens whose rows of `embed_tokens` or `lm_head` are learned, as in PEFT: if tied, `embed_tokens` means both."""

    def __post_init__(self) -> None:
        if self.targets in (ALL_LINEAR, (ALL_LINEAR,)):  # with experts, None would mean these alone
            meant = None if self.target_parameters is None else (ALL_LINEAR,)
            msgspec.structs.force_setattr(self, "targets", meant)


class LoraSettings(LoraRequest, frozen=True):
    """The shape of an adapter: a `LoraRequest` without limits on names, as imported ones may list thousands."""

    targets: tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    targets_bd_a: tuple[str, ...] | None = None
    targets_bd_b: tuple[str, ...] | None = None
    cartridge: bool = False
    """The adapter is a KV prefix of `r` tokens, and has no LoRA matrices."""
    prefix_tokens: int = 0
    """Tokens of a KV prefix beside the LoRA matrices; 0: none."""
    decoder: bool = False
    """The adapter of a job that trains an encoder, and a LoRA of the decoder: each site has a second pair for it, under
    a name with `DECODER`."""
    modules_to_save: tuple[str, ...] | None = None
    """Names of the embedding or head that an imported adapter replaces as a whole. Such an adapter can be served, but
    not trained."""

    @property
    def prefix(self) -> int:
        """Tokens of the KV prefix, alone or beside LoRA; 0: none."""
        return self.r if self.cartridge else self.prefix_tokens
