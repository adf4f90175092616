"""Work for jobs on a thread while the engine captures a graph: whatever comes of it, the capture goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from coserve.core.cancellation import Cancellation, Cancelled
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.gpu.capture import captured
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.finetuning import Bench, job_spec, random_corpus
from tests.support.gpu_engine import gpu_base
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

CORPUS = random_corpus()


def during_a_capture(work: Callable[[], object]) -> BaseException | None:
    """What `work` raised, on a thread in the middle of a capture whose graph must give the right result afterwards."""
    x = torch.ones(64, 64, device="cuda")
    y = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as thread:
        with captured(graph):
            y.copy_(x + 1)
            error = thread.submit(work).exception()
            y.add_(x)
        graph.replay()
        torch.cuda.synchronize()
    assert bool((y == 3).all())
    return error


def test_a_start_that_succeeds(tmp_path: Path) -> None:
    bench = Bench(gpu_base(tiny_model("llama")), tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS))
    assert during_a_capture(lambda: bench.trainer.load(spec, Cancellation())) is None


@pytest.mark.parametrize("after_gpu_work", [False, True])
def test_a_start_that_is_cancelled(after_gpu_work: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, cancellation = Bench(gpu_base(tiny_model("llama")), tmp_path), Cancellation()
    spec = bench.place(CORPUS, job_spec(CORPUS))
    if after_gpu_work:
        made = TrainingLoop.__init__

        def make(self: TrainingLoop, *args: object, **kwargs: object) -> None:
            made(self, *args, **kwargs)  # type: ignore[arg-type]
            cancellation.cancel()

        monkeypatch.setattr(TrainingLoop, "__init__", make)
    else:
        cancellation.cancel()
    assert isinstance(during_a_capture(lambda: bench.trainer.load(spec, cancellation)), Cancelled)


def test_a_start_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(gpu_base(tiny_model("llama")), tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS))

    def broken(*args: object, **kwargs: object) -> None:
        torch.ones(8, device="cuda").sum().item()
        raise KeyError("broken")

    monkeypatch.setattr(AdapterOptimizer, "__init__", broken)
    assert isinstance(during_a_capture(lambda: bench.trainer.load(spec, Cancellation())), KeyError)


def test_layers_that_are_compiled() -> None:
    base = gpu_base(tiny_model("llama"))
    CompiledLayers(base, LayerCut(base)).compile()  # as the warm-up: caches are filled
    layers = CompiledLayers(base, LayerCut(base))
    assert during_a_capture(layers.compile) is None
    assert layers.ready
