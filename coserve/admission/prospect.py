"""Predicts the GPU memory that a base, its adapters, requests and jobs need, without a GPU. Pure: no torch.

Weights, keys and values, recurrent states, adapters and the state of jobs are exact. Activations are computed from the
sizes of the linear modules, for compiled layers, which keep their input, attention's output and the outputs of all
products.
"""

from __future__ import annotations

from coserve.admission.shapes import ITEMSIZE, job_state_bytes, lora_shapes
from coserve.core.gpu_memory import EXTRA_SLOTS, GIB, GRAPHS, STEP_TOKENS, BaseSizes
from coserve.core.types import LoraSettings, Wire

CONTEXT = 768 << 20
"""Bytes of the CUDA context, compiled kernels and libraries."""
STATISTICS = 1.03
"""Factor for the smaller tensors that a layer keeps: statistics of norms and of attention, x Aᵀ."""
LOGITS = 6
"""Bytes of one logit in a generation step: a 16-bit and an fp32 copy."""
LOSS = 4.3
"""Bytes of one logit in training: the 16-bit logit and its gradient."""
POSITIONS = 2048
"""Most positions whose logits training computes at a time."""
GPUS = {24: 22.4, 48: 44.4, 80: 79.1, 141: 139.8}
"""Usable GiB by advertised GB, measured or documented for the smallest such card: L4, L40S, H100, H200."""


class Wish(Wire, frozen=True):
    """The work that has to fit on one GPU, or on each of those that share the base."""

    adapters: int
    """Adapters on the GPU at a time."""
    rank: int
    requests: int
    """Requests that run at once."""
    context: int
    """Tokens of each request, prompt and answer."""
    jobs: int
    """Jobs that train at once; 0: none."""
    micro_batch_tokens: int
    fraction: float
    """Fraction of the GPU's memory that the engine may take."""
    kv_cache_dtype: str = "auto"
    """As `--kv-cache-dtype`; with fp8 a cached key or value element takes one byte."""


class Need(Wire, frozen=True):
    """Bytes that a `Wish` needs on a GPU, by use."""

    weights: int
    context: int
    graphs: int
    step: int
    kv: int
    states: int
    """Recurrent states, `EXTRA_SLOTS` included."""
    adapters: int
    jobs: int
    """State that jobs keep between micro-batches."""
    training: int
    """One micro-batch."""

    @property
    def total(self) -> int:
        beside = self.weights + self.context + self.graphs + self.step + self.adapters + self.jobs + self.training
        return beside + self.kv + self.states


class Fit(Wire, frozen=True):
    """Whether a `Wish` fits on one size of GPU."""

    gb: int
    budget: int
    """Bytes that the engine may take."""
    fits: bool
    requests: int
    """Most requests of `Wish.context` tokens that fit while everything else is as wished."""


def needed(sizes: BaseSizes, wish: Wish) -> Need:
    """Return the bytes that the wish needs. Raises `InvalidRequest` for a rank that no adapter can have."""
    base, item = sizes.spec, ITEMSIZE[sizes.spec.dtype]
    shapes = lora_shapes(LoraSettings(r=wish.rank), base, ranks=sizes.ranks)
    state = job_state_bytes(shapes, base.dtype, early_stopping=False)
    outputs, vocab = sum(sizes.outputs) / base.layers + sizes.experts, -(-base.vocab // sizes.ranks)
    layer = STATISTICS * item * (outputs + 2 * base.carried)
    tokens = wish.micro_batch_tokens
    backward = max(tokens * layer, LOSS * vocab * min(tokens, POSITIONS) + item * base.carried * tokens)
    return Need(
        weights=sizes.weights,
        context=CONTEXT,
        graphs=GRAPHS,
        step=LOGITS * base.vocab * wish.requests
        + STEP_TOKENS["cuda"] * item * (2 * max(sizes.outputs) + 4 * base.carried)
        + sizes.expanded,
        kv=_cached(sizes, wish) * wish.context * wish.requests,
        states=sizes.states * (wish.requests + EXTRA_SLOTS),
        adapters=wish.adapters * item * sum(shape.a + shape.b for shape in shapes),
        jobs=wish.jobs * state.total,
        training=round(base.layers * layer * tokens + backward) + sizes.expanded if wish.jobs else 0,
    )


def fit(sizes: BaseSizes, wish: Wish, gb: int) -> Fit:
    """Return whether the wish fits on a GPU that is sold as one of `gb` GB, and how many requests would."""
    need, budget = needed(sizes, wish).total, int(GPUS[gb] * wish.fraction * GIB)
    each = _cached(sizes, wish) * wish.context + sizes.states + LOGITS * sizes.spec.vocab
    left = max(0, budget - (need - each * wish.requests))
    return Fit(gb=gb, budget=budget, fits=need <= budget, requests=left // each)


def _cached(sizes: BaseSizes, wish: Wish) -> int:
    """Return the bytes of a token's keys and values."""
    return sizes.kv if wish.kv_cache_dtype == "auto" else sizes.kv // ITEMSIZE[sizes.spec.dtype]
