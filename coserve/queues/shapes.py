"""The composition of a generation step, as features of its predicted time. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

StepKind = Literal["prefill", "decode"]
"""Kinds of generation steps: with prefill, or decode only. Each has its own predictor, because they run different
kernels and graphs."""
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)


class StepShape(NamedTuple):
    """The composition of a generation step."""

    decodes: int = 0
    """Sequences that compute one token."""
    kv_tokens: int = 0
    """KV-cache tokens that the decodes read."""
    prefill: int = 0
    """Prompt tokens."""
    pairs: int = 0
    """Query-key pairs that attention computes for the prompt tokens."""
    adapter_bytes: int = 0
    """Size of the LoRA matrices that the step reads, each adapter once."""
    alone: int = 0
    """1 if no other step was in flight at the launch: the device waits for the launch."""

    @property
    def kind(self) -> StepKind:
        return "prefill" if self.prefill else "decode"

    @property
    def features(self) -> tuple[float, ...]:
        """Features for a `Predictor`, each with its own cost; the leading 1 is the constant."""
        return 1.0, self.decodes, self.kv_tokens, self.prefill, self.pairs, self.adapter_bytes, self.alone

    def __add__(self, other: object) -> StepShape:
        """The shape of several steps measured together."""
        assert isinstance(other, StepShape), other
        return StepShape(*map(sum, zip(self, other, strict=True)))


def prompt_pairs(tokens: int, computed: int = 0) -> int:
    """`StepShape.pairs` of `tokens` tokens of a prompt whose first `computed` tokens are in the cache."""
    return tokens * computed + tokens * (tokens + 1) // 2


STEP_FEATURES = len(StepShape().features)
