"""Memory profile: GPU memory of a generation step and of a training micro-batch as linear functions of tokens.

Measured once for each base and GPU. The components are those of the ETS paper, §4.2: M_weights is the loaded base;
M_no_grad is the peak of a generation step; M_act is the peak of a micro-batch's forward, and M_backward that of its
backward beyond it. What a job keeps between micro-batches (master weights, moments, gradients) depends on the adapter,
not on tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from coserve.core.gpu_memory import LinearBytes, TrainingCosts
from coserve.core.types import Wire
from coserve.core.validation import decode_json

log = logging.getLogger(__name__)

T = TypeVar("T")


class Profile(Wire, frozen=True):
    """Peak memory by use, in bytes on top of the base's weights."""

    no_grad: LinearBytes
    """Peak of a generation step, by its tokens."""
    act: LinearBytes
    """Peak of a training micro-batch's forward, by its tokens."""
    backward: LinearBytes
    """Peak of the backward and the optimizer step beyond `act`, by the micro-batch's tokens."""
    job: int
    """Bytes that one job of rank `DEFAULT_RANK` keeps between micro-batches."""
    costs: TrainingCosts
    """Training costs of adapters with other ranks and sites."""
    error: float
    """Relative error at full size of the lines fitted to the smaller sizes, for a step and a micro-batch together."""


class TrainingPeaks(Wire, frozen=True):
    """Measured bytes of one micro-batch with an adapter of rank `DEFAULT_RANK`."""

    forward: int
    """Peak of the forward, beyond `job`."""
    whole: int
    """Peak of forward, backward and optimizer step, beyond `job`."""
    job: int
    """Bytes that the job keeps between micro-batches."""


class Measures(Protocol):
    """Runs a step or a micro-batch on the device and returns its peak in bytes."""

    def step(self, tokens: int) -> int: ...
    def micro_batch(self, tokens: int) -> TrainingPeaks: ...
    def costs(self, tokens: int) -> TrainingCosts:
        """Measure the training costs with micro-batches of up to `tokens` tokens."""
        ...


def fit(samples: Sequence[tuple[int, int]]) -> LinearBytes:
    """Fit a least-squares line to (tokens, bytes), raised until no sample is above it: a plan must not be too small."""
    assert samples, "expected at least one sample"
    n = len(samples)
    x, y = sum(tokens for tokens, _ in samples) / n, sum(size for _, size in samples) / n
    spread = sum((tokens - x) ** 2 for tokens, _ in samples)
    slope = sum((tokens - x) * (size - y) for tokens, size in samples) / spread if spread else 0.0
    slope = max(0.0, slope)
    return LinearBytes(fixed=max(size - slope * tokens for tokens, size in samples), per_token=slope)


def sizes(most: int) -> tuple[int, ...]:
    """A quarter, a half and all of `most` tokens, without duplicates."""
    return tuple(sorted({max(1, most // 4), max(1, most // 2), most}))


def measure(measures: Measures, *, step_tokens: int, micro_batch_tokens: int) -> Profile:
    """Measure steps and micro-batches of three sizes. `Profile.error` compares the largest with the line fitted to the
    other two."""
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
        costs=measures.costs(micro_batch_tokens),
        error=(predicted - measured) / max(measured, 1),
    )


def _check(samples: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the last sample's bytes as predicted by the line through the others, and as measured."""
    tokens, size = samples[-1]
    return (fit(samples[:-1]).at(tokens), size) if len(samples) > 1 else (size, size)


class _Saved(Wire, frozen=True):
    key: tuple[str, ...]
    profile: Profile


class _SavedGraphs(Wire, frozen=True):
    key: tuple[str, ...]
    bytes: int


def load_profile(path: Path, key: Sequence[str]) -> Profile | None:
    """Return the profile saved under this key, or None."""
    saved = _load(path, _Saved)
    return saved.profile if saved is not None and saved.key == tuple(key) else None


def save_profile(path: Path, key: Sequence[str], profile: Profile) -> None:
    """Replace the saved profile. If writing fails, the next start measures again."""
    _save(path, _Saved(key=tuple(key), profile=profile), "the next start measures the memory of steps again")


def load_graph_bytes(path: Path, key: Sequence[str]) -> int | None:
    """Return the bytes of CUDA graphs that an earlier process saved under this key, or None."""
    saved = _load(path, _SavedGraphs)
    return saved.bytes if saved is not None and saved.key == tuple(key) else None


def save_graph_bytes(path: Path, key: Sequence[str], size: int) -> None:
    """Replace the saved size. If writing fails, the next start plans with `plan.GRAPHS`."""
    _save(path, _SavedGraphs(key=tuple(key), bytes=size), "the next start assumes a size of CUDA graphs")


def load_layer_costs(path: Path) -> TrainingCosts | None:
    """Return the saved memory costs of compiled training layers, or None."""
    return _load(path, TrainingCosts)


def save_layer_costs(path: Path, costs: TrainingCosts) -> None:
    """Replace the saved costs. If writing fails, jobs are planned with the costs of uncompiled layers."""
    _save(path, costs, "the memory of jobs is planned without compiled layers of training")


def _load(path: Path, kind: type[T]) -> T | None:
    try:
        return decode_json(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        log.warning("%s cannot be read, and counts as missing: %s", path, reason)
        return None


def _save(path: Path, saved: Wire, otherwise: str) -> None:
    """Write `saved` to `path`. `otherwise`: the consequence if that fails, for the log."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_bytes(msgspec.json.encode(saved))
        temporary.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s): %s", path, error.strerror, otherwise)
