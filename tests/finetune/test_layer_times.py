"""Times of layers by what they keep, with a clock that products and attention advance."""

from __future__ import annotations

import pytest
from torch import Tensor

from coserve.core.gpu_memory import Kept
from coserve.engine.warming.layer_measurements import REPEATS, LayerTimer
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.kernels.gpu.launcher import launch_nothing
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.running_pass import RunningPass
from tests.support import predicted_memory as predicted
from tests.support.finetuning import tiny_base
from tests.support.interpreted import interpreted
from tests.support.layer_graphs import RepeatingRecorder

TOKENS, PRODUCT, ATTENTION = 64, 3.0, 7.0
"""Seconds of one product of sites, and of one attention; their backwards take twice as long."""


class CountedClock:
    """The first runs of everything are slower, as if others used the device."""

    def __init__(self) -> None:
        self.now, self.runs = 0.0, 0

    def mark(self) -> object:
        self.runs += 1
        return self.now

    def seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, float) and isinstance(end, float)
        return (end - begin) * (2 if self.runs % (4 * REPEATS) < 12 else 1)


@pytest.mark.parametrize("graphed", [False, True])
def test_times_are_of_what_a_layer_computes(graphed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    base, clock = tiny_base("llama"), CountedClock()
    layers = CompiledLayers(base, LayerCut(base), interpreted)
    layers.compile()
    layers.compile_levels()
    for name, seconds in (
        ("learn", PRODUCT),
        ("learn_backward", 2 * PRODUCT),
        ("attend", ATTENTION),
        ("attend_backward", 2 * ATTENTION),
    ):
        real = getattr(RunningPass, name)

        def timed(self: RunningPass, *given, real=real, seconds=seconds) -> Tensor | tuple[Tensor, ...]:
            clock.now += seconds
            return real(self, *given)

        monkeypatch.setattr(RunningPass, name, timed)
    graphs = LayerGraphs(layers, RepeatingRecorder, least_step=8) if graphed else None
    with launch_nothing():
        found = LayerTimer(base, layers, predicted.FakeSegmentedBackend(), graphs, clock).times(TOKENS)
    once = 3 * (4 * PRODUCT + ATTENTION)
    expected = {Kept.ALL: once, Kept.ATTENTION: once + 3 * PRODUCT, Kept.INPUT: once + 3 * PRODUCT + ATTENTION}
    for kept, seconds in expected.items():
        assert found[kept].at(TOKENS) * TOKENS / 1e9 == pytest.approx(seconds), kept
        assert found[kept].per_row_token == 0, "all rows that fit are of one length"
