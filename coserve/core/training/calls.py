"""Training sessions of clients: what the API process asks of the engine. A session is a job whose next step comes from
a client. No torch."""

from __future__ import annotations

from msgspec import Struct

from coserve.core.training.jobs import JobSpec
from coserve.core.training.schemas import OptimStepRequest
from coserve.core.types import AdapterRef


class SessionSpec(JobSpec, frozen=True):
    """A session as the engine sees it: a job without a corpus. `tokens` and `longest`: the most tokens of a
    micro-batch, for the memory plan; `version` and the schedule are unused."""

    state: tuple[str, str] | None = None
    """Run and name of the saved state to begin with: `DataFolder.session_state`."""
    with_optimizer: bool = False
    """Whether the saved moments and step count are loaded too."""


class Compute(Struct, frozen=True, tag=True):
    """Forward, and backward if it `learns`, of the summed loss. The answer's `values` are the log-probabilities of all
    targets in order (fp32), its `metrics` have the loss."""

    batch: bytes
    """Examples, encoded by `data.corpus.batch.examples_out`."""
    loss: str
    config: dict[str, float]
    learns: bool


class Step(Struct, frozen=True, tag=True):
    """Update the weights with the gradients summed since the last step."""

    adam: OptimStepRequest


class SaveState(Struct, frozen=True, tag=True):
    """Write weights and moments to the data folder, durably."""

    run: str
    name: str
    project: str
    """The project that owns the state."""


class SaveAdapter(Struct, frozen=True, tag=True):
    """Make the weights available to requests as `ref`: with files, or in memory alone until `DropAdapter`."""

    ref: AdapterRef
    files: bool


Call = Compute | Step | SaveState | SaveAdapter
"""A client's call of its session. Calls are executed in order."""
