"""Plain data about a GPU's memory: cost models measured at the start, and current usage by component. No torch."""

from __future__ import annotations

from enum import StrEnum

from coserve.core.types import BaseSpec, Wire

GIB = 1 << 30
STEP_TOKENS = {"cpu": 512, "cuda": 2048}
"""Default of the setting `step_tokens`, by device type."""
LORA_RANKS = (16, 32, 64, 128, 256)
"""LoRA ranks that kernels are compiled and graphs are captured for. Each serves every rank up to its own; larger ranks
have no graph."""
GRAPHS = 2 << 30
"""Bytes reserved for CUDA graphs and autotuning until their size is known. Graphs are captured after the pool is
allocated, because they record its address."""
EXTRA_SLOTS = 3
"""Memory of recurrent states in addition to that of sequences, in slots: one that stays zero, one that padding writes,
and the buffer of snapshots."""


class Kept(StrEnum):
    """Activations of a training micro-batch that a compiled layer keeps from forward to backward. The rest is
    recomputed."""

    ALL = "all"
    """Outputs of GEMMs, attention and recurrences. Norms, rotary and activations are recomputed: recomputing is cheaper
    than storing."""
    ATTENTION = "attention"
    """The layer's input and the output of attention or of a recurrence."""
    INPUT = "input"
    """The layer's input."""


class LinearBytes(Wire, frozen=True):
    """Linear model of memory: `fixed + per_token * tokens` bytes."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> int:
        return max(0, round(self.fixed + self.per_token * tokens))


class HeadCosts(Wire, frozen=True):
    """Bytes of the final norm, the logits and the loss. Logits are computed in chunks of positions. With few positions,
    the backward of the norm needs more memory than the logits."""

    norm: LinearBytes
    fixed: float
    per_token: float
    per_position: float
    most: int
    """Positions per chunk, at most."""

    def at(self, tokens: int, positions: int) -> int:
        logits = self.fixed + self.per_token * tokens + self.per_position * min(positions, self.most)
        return max(0, self.norm.at(tokens), round(logits))


class GroupCosts(Wire, frozen=True):
    """Linear modules of a layer that read the same input (such as q, k and v), and their bytes per token."""

    roles: tuple[str, ...]
    """Names of the modules within a layer."""
    kept: float
    """Bytes per token kept for the backward if an adapter changes one of these modules: their input."""
    bottom: float
    """Bytes per token that the lowest trained layer keeps if these are its first adapted modules: embedding included,
    LoRA excluded."""


class LayerTime(Wire, frozen=True):
    """Device time of one layer's forward and backward, in nanoseconds per token. Attention's part grows with row
    length."""

    fixed: float
    per_row_token: float

    def at(self, row: float) -> float:
        """Return nanoseconds per token for rows of `row` tokens."""
        return self.fixed + self.per_row_token * row


class LevelCosts(Wire, frozen=True):
    """Costs of compiled layers that keep less than `Kept.ALL`, measured with an adapter of `TrainingCosts.rank` at
    every site."""

    kept: float
    """Bytes per token that such a layer keeps, LoRA excluded."""
    shrinks: tuple[bool, ...]
    """For each group of sites: True if x Aᵀ is kept, False if it is recomputed together with the group's GEMM."""
    backward: LinearBytes
    """Bytes of such a layer's backward, in addition to what is kept."""
    time: LayerTime


class TrainingCosts(Wire, frozen=True):
    """Activation bytes of a training micro-batch on one GPU, measured with an adapter of LoRA rank `rank` at every
    site.

    Between forward and backward a micro-batch keeps `kept` bytes. The head's and then each layer's backward need
    temporary memory on top, one at a time (`admission/micro_batch.py`).
    """

    rank: int
    fixed: float
    """Bytes that do not depend on the number of tokens."""
    layer: float
    """Bytes per token that each layer above the lowest trained one keeps, LoRA excluded."""
    groups: tuple[GroupCosts, ...]
    """Groups of sites, in execution order."""
    recompute: LinearBytes
    """Bytes kept when layers are recomputed, without the inputs of the layers above the lowest trained one."""
    head: HeadCosts
    """Bytes of the head, in addition to what is kept."""
    last: LinearBytes
    """Bytes of the backward of a layer's last group, in addition to what is kept."""
    others: LinearBytes
    """Bytes of the backward of a layer's other groups, in addition to what is kept without the last group's input."""
    time: LayerTime | None = None
    """Time of a layer that keeps all. None: not measured."""
    levels: dict[Kept, LevelCosts] = {}
    """Costs of compiled layers that keep less. If empty, a recomputed layer repeats its whole forward and keeps all
    until its backward has ended."""


class JobUse(Wire, frozen=True):
    """One job's bytes on one GPU."""

    id: str
    adapter: int
    """The weights that forwards read, including those of a teacher or a reference."""
    gradients: int
    optimizer: int
    """fp32 weights, moments (or the buffers that stream paged moments), and the best weights if the job stops early."""
    activations: int
    """Peak bytes of one micro-batch that contains only this job. Micro-batches, of one job or shared by several, are
    computed one at a time."""
    micro_batch_tokens: int
    recomputed_layers: int
    """Layers that are fully recomputed in the backward, of `layers`."""
    layers: int
    """Layers of the base."""
    pinned: int = 0
    """Host memory of the job's state: checkpoint copies and paged moments."""
    partly_recomputed_layers: int = 0
    """Layers recomputed except for attention, of `layers`."""

    @property
    def state(self) -> int:
        """Return the bytes that the job keeps between micro-batches."""
        return self.adapter + self.gradients + self.optimizer


class MemoryUse(Wire, frozen=True):
    """A GPU's memory by component, in bytes. All components and `free` add up to `total`."""

    total: int
    weights: int
    """The base's weights and permanent buffers."""
    pages: int
    """The page pool for keys, values and adapters; `adapters` is included."""
    adapters: int
    """Pages of the pool that hold adapters."""
    graphs: int
    """CUDA graphs captured so far, measured."""
    jobs: int
    """State that jobs keep between micro-batches."""
    temporary: int
    """Other live allocations: activations, and temporaries of steps."""
    cached: int
    """Free memory that torch's caching allocator holds."""
    context: int
    """The CUDA context, compiled kernels and libraries (cuBLAS, NCCL), and what other processes held when the engine
    started."""
    others: int
    """Memory that other processes took since then."""
    free: int
    planned: int
    """The most bytes that torch should ever need; 0 without a memory plan."""
    training: int
    """Bytes that all jobs together may use now: their state and one micro-batch."""
    needed: int
    """The part of `training` that the active jobs are predicted to need."""
    peak: int
    """Peak bytes allocated by torch so far."""
    pinned: int = 0
    """Host memory that holds the state of all jobs."""
    pinned_limit: int | None = None
    """Limit of host memory for the state of jobs, `pinned` included; None: no limit."""
    each: tuple[JobUse, ...] = ()


USES = {
    "weights": "base and buffers",
    "pages": "page pool: keys, values and adapters",
    "graphs": "CUDA graphs",
    "jobs": "adapters, gradients and optimizers of jobs",
    "temporary": "activations, and temporaries of steps",
    "cached": "free in torch's cache",
    "context": "CUDA context and libraries",
    "others": "other processes",
    "free": "free",
}
"""Maps fields of `MemoryUse`, which add up to the whole device, to their descriptions."""


class PoolShape(Wire, frozen=True):
    """The page pool of one tensor-parallel rank (of rank 0 if there are several), also on a CPU."""

    pages: int
    page_bytes: int
    page_tokens: int
    """Tokens of keys and values per page."""

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes

    def has_room_beside(self, pages: int) -> bool:
        """Return whether an adapter of `pages` pages leaves a page for tokens. If not, it can never be served."""
        return pages < self.pages


class MemoryModel(Wire, frozen=True):
    """Costs that predict a job's memory, and the memory available to jobs."""

    costs: TrainingCosts
    """Costs of the base's layers as they run without compilation."""
    training: int
    """Bytes for jobs (their state and one micro-batch) if no other process takes memory."""
    ranks: int = 1
    """Number of GPUs that shard the base; all numbers are of the GPU with the least memory."""
    fully_sharded: bool = False
    """Both LoRA matrices are sharded (`lora_sharding slora`)."""
    recompute: bool = False
    """The engine always recomputes layers."""
    pinned: int | None = None
    """Bytes of host memory for the state of all jobs; None: no limit."""
    compiled: TrainingCosts | None = None
    """Costs of compiled layers, for jobs that use them; None: layers are not compiled, or not measured."""
    graphs: bool = False
    """Jobs run layers as CUDA graphs, even if `compiled` is None, as under tensor parallelism."""


class BaseSizes(Wire, frozen=True):
    """Sizes of a base, or of what each of several GPUs holds of it, from its config alone."""

    spec: BaseSpec
    """The whole base, without a fingerprint; the sites are all linear modules of the decoder layers."""
    outputs: tuple[int, ...]
    """Output features on a GPU of each of these sites."""
    weights: int
    """Bytes of the weights as served."""
    kv: int
    """Bytes of one token's keys and values."""
    states: int
    """Bytes of one sequence's recurrent states; 0 without layers that have some."""
    experts: int
    """Elements that the experts of one layer compute for a token; 0 without a mixture of experts."""
    expanded: int = 0
    """Most bytes of weights that are dequantised at a time."""
    ranks: int = 1
    """GPUs that share the base: `--tp`."""
