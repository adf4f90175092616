"""What is known of a GPU's memory, as plain data: lines that were measured at the start, and where its bytes are now.
No torch."""

from __future__ import annotations

from enum import StrEnum

from coserve.core.types import Wire


class Kept(StrEnum):
    """What a compiled layer keeps of a training micro-batch between its forward and its backward. All else is computed
    again."""

    ALL = "all"
    """What products and attention have put out. Norms, rotary and activations are computed again: they cost less than
    their bytes."""
    ATTENTION = "attention"
    """The layer's input, and attention's output."""
    INPUT = "input"
    """The layer's input."""


class Line(Wire, frozen=True):
    """Bytes as a function of tokens: `fixed + per_token * tokens`."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> int:
        return max(0, round(self.fixed + self.per_token * tokens))


class HeadCosts(Wire, frozen=True):
    """Bytes of the final norm, the logits and their loss. Logits are computed for some positions at a time; where these
    are few, the backward of the norm takes more than they do."""

    norm: Line
    fixed: float
    per_token: float
    per_position: float
    most: int
    """Positions computed at once, at most."""

    def at(self, tokens: int, positions: int) -> int:
        logits = self.fixed + self.per_token * tokens + self.per_position * min(positions, self.most)
        return max(0, self.norm.at(tokens), round(logits))


class GroupCosts(Wire, frozen=True):
    """Sites of a layer that read one input. Bytes a token."""

    roles: tuple[str, ...]
    """Names of the sites within a layer."""
    kept: float
    """What a layer keeps for the backward in addition if an adapter changes one of them: their input."""
    bottom: float
    """What the lowest layer that is trained keeps if these are its first sites that an adapter changes, without LoRA's
    own tensors; the micro-batch's embedding is part of it."""


class LayerTime(Wire, frozen=True):
    """Nanoseconds a token of a layer's forward and backward on the device; attention's part grows with the length of
    rows."""

    fixed: float
    per_row_token: float

    def at(self, row: float) -> float:
        """For rows of so many tokens."""
        return self.fixed + self.per_row_token * row


class LevelCosts(Wire, frozen=True):
    """Of compiled layers that keep less than all, measured with an adapter of `TrainingCosts.rank` at every site."""

    kept: float
    """Bytes a token that such a layer keeps, without LoRA's."""
    shrinks: tuple[bool, ...]
    """Of each group of sites: whether its x Aᵀ is kept. The others' are computed again, with the group's product."""
    backward: Line
    """The backward of such a layer, beyond what is kept."""
    time: LayerTime


class TrainingCosts(Wire, frozen=True):
    """Activations of a training micro-batch on one rank, measured with an adapter of `rank` at every site.

    A micro-batch keeps `kept` between its forward and its backward; the head and a layer's backward take more on top,
    one after the other (`admission/micro_batch.py`).
    """

    rank: int
    fixed: float
    """Bytes, however many tokens."""
    layer: float
    """Bytes a token that each layer above the lowest trained one keeps, without LoRA."""
    groups: tuple[GroupCosts, ...]
    """In the order in which they run."""
    recompute: Line
    """What is kept where layers are computed again, but for the inputs of the layers above the lowest trained one."""
    head: HeadCosts
    """Beyond what is kept."""
    last: Line
    """The backward of the last group of a layer, beyond what is kept."""
    others: Line
    """The backward of the other groups of a layer, beyond what is kept without the last group's input."""
    time: LayerTime | None = None
    """Of a layer that keeps all. None: it was not measured."""
    levels: dict[Kept, LevelCosts] = {}
    """Of layers that keep less, where they are compiled so. Without them a layer that is computed again runs its whole
    forward, and keeps all until its backward has ended."""


class JobUse(Wire, frozen=True):
    """Bytes of one job on one GPU."""

    id: str
    adapter: int
    """The copies that forwards read, and those of a teacher or a reference."""
    gradients: int
    optimizer: int
    """fp32 weights, moments, or the buffers that paged ones pass through, and the best weights of a job with early
    stopping."""
    activations: int
    """The most that a micro-batch of the job alone takes, while it is computed. One micro-batch, of one job or of
    several that share it, is computed at a time."""
    micro_batch_tokens: int
    recomputed_layers: int
    """Computed again in the backward, of `layers`."""
    layers: int
    """Of the base."""
    pinned: int = 0
    """Host memory of its state: copies for checkpoints, and paged moments."""
    partly_recomputed_layers: int = 0
    """Computed again but for attention, of `layers`."""

    @property
    def state(self) -> int:
        """What it keeps between micro-batches."""
        return self.adapter + self.gradients + self.optimizer


class MemoryUse(Wire, frozen=True):
    """Where a GPU's bytes are. All uses and `free` together are `total`."""

    total: int
    weights: int
    """The base, and buffers that stay."""
    pages: int
    """The pool, for keys, values and adapters, `adapters` of it included."""
    adapters: int
    """Pages of the pool that hold adapters."""
    graphs: int
    """Of CUDA graphs: measured, as far as they are captured."""
    jobs: int
    """What jobs keep between micro-batches."""
    temporary: int
    """Allocated besides: activations, and temporaries of steps."""
    cached: int
    """Held by torch's allocator for the next temporaries."""
    context: int
    """The CUDA context, compiled kernels and libraries (cuBLAS, NCCL), and what other processes had when the engine
    started."""
    others: int
    """What other processes took since then."""
    free: int
    planned: int
    """What torch should never need more than; 0 without a plan."""
    training: int
    """Bytes that jobs may have in all now: what they keep, and one micro-batch."""
    needed: int
    """Bytes that the active jobs are predicted to need of `training`."""
    peak: int
    """The most bytes that torch has allocated so far."""
    pinned: int = 0
    """Host memory, not the GPU's: the state of all jobs."""
    pinned_limit: int | None = None
    """Of `pinned`; None: none."""
    each: tuple[JobUse, ...] = ()


class PoolShape(Wire, frozen=True):
    """The page pool of one rank, on a CPU, too: of several ranks, rank 0's."""

    pages: int
    page_bytes: int
    page_tokens: int
    """Tokens whose keys and values a page holds."""

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes

    def has_room_beside(self, pages: int) -> bool:
        """Whether an adapter of so many pages leaves one for tokens. Without one it can never be served."""
        return pages < self.pages


class MemoryModel(Wire, frozen=True):
    """What predicts a job's memory, and what there is for jobs."""

    costs: TrainingCosts
    """Of the base's own layers."""
    training: int
    """Bytes for jobs where no other process takes any of them: the jobs' state and one micro-batch."""
    ranks: int = 1
    """GPUs that share the base; all numbers are of the one that has least."""
    fully_sharded: bool = False
    """Both LoRA matrices are sharded (`lora_sharding slora`)."""
    recompute: bool = False
    """The engine computes layers again in any case."""
    pinned: int | None = None
    """Bytes of host memory for the state of all jobs; None: any number."""
    compiled: TrainingCosts | None = None
    """Of compiled layers, for jobs that run them; None: there are none, or they were not measured."""
    graphs: bool = False
    """Jobs run layers as CUDA graphs whether `compiled` is known or not: with ranks it is not."""
