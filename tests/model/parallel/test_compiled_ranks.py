"""Compiled training layers of ranks: what one process computes by the model's own layers, and no collective more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from coserve.model.layers import LayerCut
from coserve.model.parallel.mesh import LoneRank, Mesh
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support import sharded
from tests.support.examples import in_turns, marks_on_days, on_days
from tests.support.families import tiny_family
from tests.support.interpreted import interpreted
from tests.support.ranks import Ranks
from tests.support.sharded import KINDS, Kind, Trained, load, train

LAYERS = 2
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sharded.save_base(tmp_path_factory.mktemp("base"))


def _gives_up(mesh: Mesh, folder: str, fails: str) -> str:
    """Why there are no compiled layers where rank 1 `fails` to compile them, or compiles them otherwise; and whether a
    collective after it gives every rank the same."""
    base, own = load(folder, mesh), mesh.rank == 1

    def compile_(
        graph: fx.GraphModule, inputs: Sequence[object], *, is_backward: bool
    ) -> Callable[[list[object]], Sequence[Tensor]]:
        if own and fails == "compile":
            raise RuntimeError("no compiler")
        if own and fails == "order" and is_backward:
            swap_sums(graph)
        return interpreted(graph, inputs, is_backward=is_backward)

    layers: CompiledLayers | None = None
    try:
        layers = CompiledLayers(base, LayerCut(base), compile_)
        layers.compile()
    except Exception as error:  # noqa: BLE001 - as the engine does
        assert layers is None or not layers.ready
        assert mesh.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
        return f"{type(error).__name__}: {error}"
    return ""


def swap_sums(graph: fx.GraphModule) -> None:
    """The first two sums of a layer's inputs change their places: each has the other's name."""
    first, second = graph.graph.find_nodes(op="call_function", target=torch.ops.coserve.sum_ranks.default)
    first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])
    graph.recompile()


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("compile", "FailedTogether: rank 1: RuntimeError: no compiler"),
        ("order", "FailedTogether: the ranks came to different results"),
    ],
)
def test_all_ranks_have_compiled_layers_or_none_has(two: Ranks, folder: str, fails: str, why: str) -> None:
    assert two.run(_gives_up, folder, fails) == [why, why]


def compiled(ranks: Ranks, folder: str, strategy: str, kind: Kind, steps: int = STEPS) -> list[Trained]:
    return ranks.run(train, folder, strategy, kind, 0, steps, None, "segmented", 0.0, True)


@pytest.mark.parametrize(
    ("strategy", "kind"), [("nfs", KINDS[0]), pytest.param("bd", KINDS[1], marks=marks_on_days(1, 2))]
)
def test_a_job_has_the_losses_and_the_weights_of_one_process(
    two: Ranks, folder: str, strategy: str, kind: Kind
) -> None:
    check_job(two, folder, strategy, kind)


@on_days(3)
def test_a_job_with_fully_sharded_pairs_has_the_losses_and_the_weights_of_one_process(
    ranks: Ranks, folder: str
) -> None:
    check_job(ranks, folder, "slora", Kind(16))


def holds_part(own: Tensor, whole: Tensor) -> bool:
    """Whether a rank has the numbers of its own shards, bit for bit, and zeros in place of the others'."""
    return bool(own.any()) and torch.equal(torch.where(own == 0, whole, own), whole)


def check_job(ranks: Ranks, folder: str, strategy: str, kind: Kind) -> None:
    expected = train(None, folder, strategy, kind, 0, STEPS, None, "grouped", 0.0)
    own_layers = ranks.run(train, folder, strategy, kind, 0, STEPS, None, "segmented", 0.0)[0]
    first, *others = compiled(ranks, folder, strategy, kind)
    assert first.passes == 2 * LAYERS * STEPS
    assert first.calls == own_layers.calls
    assert first.losses == pytest.approx(expected.losses, rel=1e-4)
    assert first.norms == pytest.approx(expected.norms, rel=1e-3)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(first.state[name], tensor, rtol=1e-3, atol=1e-3)
    for other in others:
        assert (other.losses, other.norms, other.calls) == (first.losses, first.norms, first.calls), "bit for bit"
        assert all(holds_part(other.state[name], tensor) for name, tensor in first.state.items())


@pytest.mark.parametrize("family", in_turns(["gemma2", "gpt2", "phi", "phi3", "cohere", "lfm2"]))
def test_a_job_of_other_layers(two: Ranks, tmp_path: Path, family: str) -> None:
    tiny_family(family).save_pretrained(tmp_path)
    expected = train(None, str(tmp_path), "nfs", KINDS[0], 0, STEPS, None, "grouped", 0.0)
    for found in compiled(two, str(tmp_path), "nfs", KINDS[0]):
        assert found.passes == 2 * LAYERS * STEPS
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
        assert found.norms == pytest.approx(expected.norms, rel=1e-3)


@pytest.mark.parametrize("family", in_turns(["llama", "phi"], days=4))
def test_a_rank_compiles_its_layers_without_the_others(tmp_path: Path, family: str) -> None:
    """With the real compiler, as a warm-up does; what it compiled is compared with the layer."""
    tiny_family(family).save_pretrained(tmp_path)
    base = load(str(tmp_path), LoneRank(1, 2))
    layers = CompiledLayers(base, LayerCut(base))
    layers.compile()
    assert layers.ready


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_adapter_of_local_and_of_fully_sharded_pairs(two: Ranks, folder: str, compiled: bool) -> None:
    """In one group of sites, and at the bottom of the lowest layer that learns."""
    kind = Kind(8, targets=("q_proj", "v_proj", "down_proj"), uneven=("q_proj", "down_proj"))
    expected = train(None, folder, "slora", kind, 0, 2, None, "grouped", 0.0)
    first, *others = two.run(train, folder, "slora", kind, 0, 2, None, "segmented", 0.0, compiled)
    for found in (first, *others):
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
        assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(first.state[name], tensor, rtol=1e-3, atol=1e-3)
        assert all(holds_part(other.state[name], first.state[name]) for other in others)
