"""The result of a profile: the four readings of the ETS paper (section 4.2.2) at each size, and lines through them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.memory.profile.lines import Line, fit_line
from benchmarks.memory.profile.request import Backend, Workload
from coserve.core.types import Wire

COMPONENTS = ("weights", "no_grad", "act", "backward")
"""M_weights, M_no_grad, M_act and M_backward."""


class Readings(Wire, frozen=True):
    """Bytes in tensors. Each peak is measured separately and includes `weights`."""

    weights: int
    """(1): the weights of the base and of the adapter."""
    no_grad: int
    """(2): the peak of a forward without gradients."""
    forward: int | None = None
    """(3): the peak of a forward that keeps activations for the backward; None for inference."""
    forward_backward: int | None = None
    """(4): the peak of forward and backward."""


class Components(Wire, frozen=True):
    """Memory components in bytes. They add up to the last reading."""

    weights: int
    no_grad: int
    act: int | None = None
    backward: int | None = None

    @property
    def total(self) -> int:
        return self.weights + self.no_grad + (self.act or 0) + (self.backward or 0)


def components_of(readings: Readings) -> Components:
    """M_weights = (1), M_no_grad = (2) - (1), M_act = (3) - (2), M_backward = (4) - (3)."""
    one, two, three, four = readings.weights, readings.no_grad, readings.forward, readings.forward_backward
    if three is None or four is None:
        return Components(weights=one, no_grad=two - one)
    return Components(weights=one, no_grad=two - one, act=three - two, backward=four - three)


class Point(Wire, frozen=True):
    """Readings at one batch size."""

    batch: int
    readings: Readings
    components: Components


class Series(Wire, frozen=True):
    """One workload of one backend, with rows of one length."""

    backend: Backend
    workload: Workload
    length: int
    points: tuple[Point, ...]
    lines: dict[str, Line]
    """Fitted lines by component, and for the `total`. Components without points are left out."""
    ended: str | None = None
    """Why sizes are missing."""
    optimizer: int = 0
    """Bytes that a job keeps between batches besides its weights: master weights, moments and gradient sums. Like the
    paper, the readings leave them out."""
    workspace: int = 0
    """Bytes that libraries such as cuBLAS keep from the first run on; the readings leave them out."""
    kv_per_token: int = 0
    """Bytes of a token's keys and values in pages; the readings of the backend coserve leave them out."""


class ProfileReport(Wire, frozen=True):
    """The JSON that `--out` writes."""

    measured: bool
    """False: predicted with fake tensors, without a GPU."""
    how: str
    device: str
    model: str
    family: str
    parameters: int
    dtype: str
    recompute: bool
    versions: dict[str, str]
    series: tuple[Series, ...]
    format: int = 1


def lines_of(points: Sequence[Point], length: int) -> dict[str, Line]:
    """Fit `Series.lines`."""
    found = {}
    for name in (*COMPONENTS[1:], "total"):
        values = [(point.batch, getattr(point.components, name)) for point in points]
        known = [(batch, value) for batch, value in values if value is not None]
        line = fit_line(known, length)
        if line is not None:
            found[name] = line
    return found
