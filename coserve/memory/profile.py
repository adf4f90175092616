"""How much GPU memory a generation step and a training micro-batch take, as lines in tokens, measured once a base and GPU.

The components of the paper's §4.2, with our step cut at every layer: M_weights is what the loaded base has allocated;
M_no_grad is a generation step's peak beyond that; M_act and M_backward are the peaks of a micro-batch's forward and of
its backward, the latter beyond the former. What a job keeps besides (masters, moments, gradients, copies) grows with the
adapter, not with tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from coserve.types import Wire

log = logging.getLogger(__name__)


class Line(Wire, frozen=True):
    """Bytes as a function of tokens: `fixed + per_token * tokens`."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> int:
        return max(0, round(self.fixed + self.per_token * tokens))


class Profile(Wire, frozen=True):
    """What was measured. All bytes are beyond the base's weights."""

    no_grad: Line
    """The peak of a generation step."""
    act: Line
    """The peak of a training micro-batch's forward."""
    backward: Line
    """What the backward and the optimizer step take beyond that."""
    job: int
    """What one job of rank `DEFAULT_RANK` keeps between micro-batches."""
    error: float
    """How far lines through the smaller sizes were from the peaks of a step and a micro-batch of the full ones together:
    (predicted - measured) / measured."""


class TrainingPeaks(Wire, frozen=True):
    """Bytes of one micro-batch of an adapter of rank `DEFAULT_RANK`."""

    forward: int
    """Peak of the forward, beyond what the job keeps."""
    whole: int
    """Peak of forward, backward and optimizer step, likewise."""
    job: int
    """What the job keeps."""


class Measures(Protocol):
    """Runs the real thing on the device and gives its peak in bytes."""

    def step(self, tokens: int) -> int: ...
    def micro_batch(self, tokens: int) -> TrainingPeaks: ...


def fit(samples: Sequence[tuple[int, int]]) -> Line:
    """The line through (tokens, bytes) by least squares, raised until no sample lies above it: a plan must not fall short."""
    assert samples, "expected at least one sample"
    n = len(samples)
    x, y = sum(tokens for tokens, _ in samples) / n, sum(size for _, size in samples) / n
    spread = sum((tokens - x) ** 2 for tokens, _ in samples)
    slope = sum((tokens - x) * (size - y) for tokens, size in samples) / spread if spread else 0.0
    slope = max(0.0, slope)
    return Line(fixed=max(size - slope * tokens for tokens, size in samples), per_token=slope)


def sizes(most: int) -> tuple[int, ...]:
    """A quarter, a half and all of `most` tokens, each once."""
    return tuple(sorted({max(1, most // 4), max(1, most // 2), most}))


def measure(measures: Measures, *, step_tokens: int, micro_batch_tokens: int) -> Profile:
    """Runs steps and micro-batches of three sizes; the largest checks what the others predict, then counts too."""
    steps = [(tokens, measures.step(tokens)) for tokens in sizes(step_tokens)]
    batches = [(tokens, measures.micro_batch(tokens)) for tokens in sizes(micro_batch_tokens)]
    whole = [(tokens, peaks.whole) for tokens, peaks in batches]
    act = fit([(tokens, peaks.forward) for tokens, peaks in batches])
    predicted, measured = (sum(pair) for pair in zip(_check(steps), _check(whole), strict=True))
    return Profile(
        no_grad=fit(steps),
        act=act,
        backward=fit([(tokens, max(0, peaks.whole - act.at(tokens))) for tokens, peaks in batches]),
        job=max(peaks.job for _, peaks in batches),
        error=(predicted - measured) / max(measured, 1),
    )


def _check(samples: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """What the line through all but the last sample says of the last one, and what was measured."""
    tokens, size = samples[-1]
    return (fit(samples[:-1]).at(tokens), size) if len(samples) > 1 else (size, size)


class _Saved(Wire, frozen=True):
    key: tuple[str, ...]
    profile: Profile


def load_profile(path: Path, key: Sequence[str]) -> Profile | None:
    """What `save_profile` left under the same key; None for anything else: then it is measured again."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
    except (OSError, msgspec.DecodeError):
        return None
    return saved.profile if saved.key == tuple(key) else None


def save_profile(path: Path, key: Sequence[str], profile: Profile) -> None:
    """Keeps the last profile only. A disk that is full costs the next start the time to measure, nothing else."""
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_bytes(msgspec.json.encode(_Saved(key=tuple(key), profile=profile)))
        beside.replace(path)
    except OSError as error:
        log.warning("the memory profile is not kept: %s", error.strerror)
