"""What a generation step computes, as far as its time depends on it. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

StepKind = Literal["prefill", "decode"]
"""Kinds of generation steps: with prefill, or decode only. Both are learned apart: they run other kernels and
graphs."""
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)


class StepShape(NamedTuple):
    """The composition of a generation step."""

    decodes: int = 0
    """Sequences that compute one token."""
    kv_tokens: int = 0
    """Tokens whose keys and values those read."""
    prefill: int = 0
    """Tokens of prompts."""
    pairs: int = 0
    """Of a prompt's token and one up to it, which attention computes."""
    adapter_bytes: int = 0
    """Of the LoRA matrices, each adapter once: its rank times what its sites read and write."""
    alone: int = 0
    """1 if it was launched with no other step in flight: the device waits for its launch."""

    @property
    def kind(self) -> StepKind:
        return "prefill" if self.prefill else "decode"

    @property
    def features(self) -> tuple[float, ...]:
        """For a `Predictor`: each has a cost of its own, and a step has one."""
        return 1.0, self.decodes, self.kv_tokens, self.prefill, self.pairs, self.adapter_bytes, self.alone

    def and_prompt(self, tokens: int, computed: int = 0) -> StepShape:
        """This and `tokens` tokens of a prompt whose first `computed` tokens are in the cache."""
        return self._replace(prefill=self.prefill + tokens, pairs=self.pairs + prompt_pairs(tokens, computed))

    def __add__(self, other: object) -> StepShape:
        """Of steps that are measured together."""
        assert isinstance(other, StepShape), other
        return StepShape(*map(sum, zip(self, other, strict=True)))


def prompt_pairs(tokens: int, computed: int = 0) -> int:
    """`StepShape.pairs` of `tokens` tokens of a prompt whose first `computed` tokens are in the cache."""
    return tokens * computed + tokens * (tokens + 1) // 2


STEP_FEATURES = len(StepShape().features)
