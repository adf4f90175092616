"""One way to run a step: what goes in, what comes out, and who runs it.

A step's input is plain data, which another process could be sent as it is. The generator schedules steps and accepts
their results; an executor runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from coserve.core.types import AdapterRef, TokenLogprob
from coserve.generate.sampling.choices import Choice, NoToken
from coserve.generate.sampling.rows import SamplingRow
from coserve.generate.sampling.scoring import PromptScoring
from coserve.kernels.attention.interface import TokenRun
from coserve.model.lora import LoraWeights

BASE_ONLY = -1
"""In place of an adapter's index: the base alone."""


class SequenceInput(Struct, frozen=True, array_like=True):
    """The tokens of one sequence that a step computes: a chunk of its prompt, or the token sampled last."""

    sequence: int
    """The sequence's number. No other sequence ever has it."""
    adapter: int
    """Index into `StepInput.adapters`, or `BASE_ONLY`."""
    tokens: list[int]
    """Token ids. One fewer than `run.tokens` if the last one is still on the device only: a step in flight samples
    it."""
    run: TokenRun
    """How many tokens, their first position, and the page table."""
    sampling: SamplingRow | None
    """How to sample the next token from the last row; None: the step does not reach the sequence's end."""
    scoring: PromptScoring | None
    """Rows whose logits score prompt tokens."""
    needs_prompt_logits: bool
    """The sequence's prompt is not fully scored: the executor must be able to give logits of any row."""


class StepInput(Struct, frozen=True, array_like=True):
    """One step: tokens of many sequences, which a forward computes in one batch."""

    adapters: tuple[AdapterRef, ...]
    """Those of the sequences, in order of first appearance."""
    sequences: list[SequenceInput]


@dataclass(frozen=True)
class StepResult:
    """Sampled tokens and prompt scores, by the sequence's number."""

    sampled: Sequence[tuple[int, Choice | NoToken]]
    scores: Sequence[tuple[int, tuple[TokenLogprob, ...] | None]] = ()
    """Log-probabilities of the rows that `SequenceInput.scoring` asked for; None: the logits are not finite."""


class StepInFlight(Protocol):
    """A step that was launched: all of a `StepInput`, or some of its sequences."""

    @property
    def sequences(self) -> Sequence[int]:
        """Their numbers."""

    @property
    def overlaps(self) -> bool:
        """Whether the next step may be launched before this one is collected."""

    def collect(self) -> StepResult:
        """Waits for the step. What it raises concerns these sequences alone; they are lost, nothing else is."""


class StepExecutor(Protocol):
    """Runs steps on the current stream. Not for two threads at once."""

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> Sequence[StepInFlight]:
        """Starts a step. `adapters[i]`: this process's weights of `step.adapters[i]`.

        The caller collects what does not overlap before it launches another step, and everything in the order returned.
        """

    def forget(self, sequence: int) -> None:
        """The sequence has ended: nothing of it is needed any more. It may still be in a step in flight."""

    def evicted(self, adapter: AdapterRef) -> None:
        """The adapter has lost its GPU copy: its addresses are not valid any more. No later step uses that copy."""

    @property
    def troubles(self) -> tuple[str, ...]:
        """What runs slower since memory ran out."""

    def prepare(self) -> bool:
        """Does some tenths of a second of work that a later step would have to do; False if none is left."""
