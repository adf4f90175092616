"""The request of a profile: a model, workloads and sizes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from coserve.core.types import DEFAULT_RANK, Wire

GPT2_XL: dict[str, object] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_positions": 1024,
    "vocab_size": 50257,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
"""The shape of GPT-2 XL (1.56 billion parameters)."""
FIGURE_4_1_BATCHES = (3, 10, 20, 30, 40, 50, 60, 70, 80, 100, 200, 500, 1000)
DTYPES = ("float32", "bfloat16", "float16")


class Backend(StrEnum):
    """The implementation whose forward and backward run."""

    COSERVE = "coserve"
    """The daemon's: packed rows, paged KV, our LoRA kernels, backward layer by layer."""
    PEFT = "peft"
    """The ETS paper's: a transformers model, bare or wrapped by PEFT, on a rectangular batch."""


class Kind(StrEnum):
    INFERENCE = "inference"
    LORA = "lora"
    FULL = "full"
    """All weights are trained. For profiles only: coserve trains adapters."""


class Workload(Wire, frozen=True):
    """A workload. `rank` and `targets` apply to LoRA; `targets` None: all linear sites."""

    kind: Kind
    rank: int | None = None
    targets: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        if self.kind is not Kind.LORA:
            return self.kind.value
        return f"LoRA rank {self.rank}, {'all sites' if self.targets is None else ','.join(self.targets)}"


class ProfileRequest(Wire, frozen=True):
    """What is profiled.

    `model`: as for `coserve serve`; only its config is read. `config`: replaces the content of the model's config.json.
    `predict`: use fake tensors even if there is a GPU.
    """

    model: str
    workloads: tuple[Workload, ...]
    batches: tuple[int, ...]
    """Rows of a batch, ascending."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    config: dict[str, object] | None = None
    backends: tuple[Backend, ...] = (Backend.COSERVE,)
    dtype: str = "bfloat16"
    recompute: bool = False
    """See the setting of `coserve serve`; only the backend coserve supports it."""
    predict: bool = False


def make_workloads(
    ranks: Sequence[int] = (DEFAULT_RANK,), targets: Sequence[Sequence[str] | None] = (None,), *, full: bool = True
) -> tuple[Workload, ...]:
    """Return inference, LoRA of each rank on each set of targets, and full fine-tuning."""
    lora = [
        Workload(kind=Kind.LORA, rank=rank, targets=None if own is None else tuple(own))
        for own in targets
        for rank in ranks
    ]
    return (Workload(kind=Kind.INFERENCE), *lora, *([Workload(kind=Kind.FULL)] if full else []))


def figure_4_1() -> ProfileRequest:
    """Return the request of figure 4.1 of the ETS paper (section 4.2.3): GPT-2 XL, rows of 11 tokens, batches of 3 to
    1000, LoRA of rank 32 on `c_attn` and `c_proj`, run by transformers and PEFT. The paper does not name the dtype: its
    versions load float32."""
    return ProfileRequest(
        model="gpt2-xl",
        config=GPT2_XL,
        workloads=make_workloads((32,), (("c_attn", "c_proj"),)),
        batches=FIGURE_4_1_BATCHES,
        lengths=(11,),
        backends=(Backend.PEFT,),
        dtype="float32",
    )
