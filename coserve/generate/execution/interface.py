"""The step executor's interface: its input, its result and its protocol.

A step's input is plain data, which can be sent to another process. The generator schedules steps and accepts their
results; an executor runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from coserve.core.logprobs import TokenLogprob
from coserve.core.types import AdapterRef
from coserve.generate.sampling.choices import Choice, NoToken
from coserve.generate.sampling.masks import Masks
from coserve.generate.sampling.rows import SamplingRow
from coserve.generate.sampling.scoring import PromptScoring
from coserve.kernels.attention.interface import TokenRun
from coserve.model.lora import LoraWeights

BASE_ONLY = -1
"""Adapter index of sequences that use the base without an adapter."""


class SequenceInput(Struct, frozen=True, array_like=True):
    """The tokens of one sequence that a step computes: a chunk of its prompt, or the token sampled last."""

    sequence: int
    """The request's number, which is never reused."""
    adapter: int
    """Index into `StepInput.adapters`, or `BASE_ONLY`."""
    tokens: list[int]
    """Token ids. One fewer than `run.tokens` if the last token is only on the device, sampled by a step in flight."""
    run: TokenRun
    """Token count, first position, and page table."""
    sampling: SamplingRow | None
    """How to sample the next token from the last row; None: the chunk does not reach the end of the sequence."""
    scoring: PromptScoring | None
    """Rows whose logits score prompt tokens; None: none."""
    needs_prompt_logits: bool
    """Whether prompt scores are still missing: the executor must provide logits of any row."""
    restored: tuple[int, ...] = ()
    """Pages of the snapshot from which its recurrent state begins; empty: the state is in its slot, or zero."""
    saved: tuple[int, ...] = ()
    """Pages for a snapshot of its recurrent state after these tokens; empty: none is saved."""


class StepInput(Struct, frozen=True, array_like=True):
    """One step: tokens of many sequences, computed by one forward."""

    adapters: tuple[AdapterRef, ...]
    """The sequences' adapters, in order of first appearance."""
    sequences: list[SequenceInput]


@dataclass(frozen=True)
class StepResult:
    """Sampled tokens and prompt scores, by the sequence's number."""

    sampled: Sequence[tuple[int, Choice | NoToken]]
    scores: Sequence[tuple[int, tuple[TokenLogprob, ...] | None]] = ()
    """Log-probabilities of the rows that `SequenceInput.scoring` asked for; None: the logits are not finite."""


class StepInFlight(Protocol):
    """A launched step: all of a `StepInput`, or some of its sequences."""

    @property
    def sequences(self) -> Sequence[int]:
        """Numbers of the sequences."""

    @property
    def overlaps(self) -> bool:
        """Whether the next step may be launched before this one is collected."""

    def collect(self) -> StepResult:
        """Wait for the step. An error concerns only these sequences, which are lost."""


class StepExecutor(Protocol):
    """Runs steps on the current stream. Not thread-safe. A subclass without CUDA graphs and without state between steps
    has only `launch`, `choose` and `evicted`."""

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> Sequence[StepInFlight]:
        """Launch a step. `adapters[i]`: this process's weights of `step.adapters[i]`.

        The caller collects results in the order returned, and those that do not overlap before it launches another
        step.
        """

    def choose(self, masks: Masks) -> None:
        """Choose the tokens of the launched step, some of whose rows are `masked`. Call it once after the launch of
        such a step, before any of its results is collected; collect earlier steps first, as the masks depend on their
        tokens."""

    def forget(self, sequence: int) -> None:
        """Drop the state of a sequence that has ended. It may still be in a step in flight."""
        return

    def evicted(self, adapter: AdapterRef) -> None:
        """The adapter's GPU copy is gone: drop its addresses. No later step uses that copy."""

    def kept(self, weights: LoraWeights) -> None:
        """An adapter is in host memory: steps of its LoRA rank may come."""
        return

    @property
    def troubles(self) -> tuple[str, ...]:
        """Notes on what runs slower since memory ran out."""
        return ()

    @property
    def graphs_missing(self) -> int:
        """CUDA graphs that `prepare` still has to capture, as known now: steps without theirs are slower."""
        return 0

    def prepare(self) -> bool:
        """Do some tenths of a second of work that a later step would need; False if none is left."""
        return False
