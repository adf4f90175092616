"""Adapters on ranks: the logits, gradients and losses of one process, and no collective that a strategy does not
need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coserve.admission.optimizers import WEIGHTS
from coserve.core.training.settings import TrainingSettings
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.model.parallel.mesh import Mesh
from tests.support import sharded
from tests.support.examples import in_turns
from tests.support.families import tiny_family
from tests.support.ranks import Ranks
from tests.support.sharded import KINDS, Kind, Trained, gradients, load, mixed_logits, train, whole_adapter

LAYERS, HIDDEN, ROWS = 2, 32, 32
"""Rows: the batch's tokens, padded on CPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sharded.save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["nfs", "slora"])
def test_a_mixed_batch_has_the_logits_of_one_process(ranks: Ranks, folder: str, strategy: str) -> None:
    expected = mixed_logits(None, folder, strategy).logits
    for found in ranks.run(mixed_logits, folder, strategy):
        torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-4)
        if strategy == "nfs":
            assert found.calls == {"all_reduce": 2 * LAYERS, "all_gather": 1}
        else:  # q, k, v, gate and up gather, o and down sum
            assert found.calls == {"all_reduce": 4 * LAYERS, "all_gather": 5 * LAYERS + 1}


def test_block_diagonal_adapters_send_nothing(ranks: Ranks, folder: str) -> None:
    """Neither do replicated ones; fully sharded ones send their intermediates."""
    base = ranks.run(mixed_logits, folder, "slora", (-1, -1))[0]
    bd = ranks.run(mixed_logits, folder, "slora", (1, 2))[0]
    assert base.calls == {"all_reduce": 2 * LAYERS, "all_gather": 1}
    assert (bd.calls, bd.bytes) == (base.calls, base.bytes)
    assert base.bytes["all_reduce"] == 2 * LAYERS * 16 * HIDDEN * 4
    nfs = ranks.run(mixed_logits, folder, "nfs", (0, 3))[0]
    assert (nfs.calls, nfs.bytes) == (base.calls, base.bytes)
    slora = ranks.run(mixed_logits, folder, "slora", (0, 0))[0]
    added = slora.bytes["all_reduce"] - base.bytes["all_reduce"]
    assert added == 2 * LAYERS * 16 * KINDS[0].rank * 4, "rows x rank, for o and down"


@pytest.mark.parametrize(
    ("strategy", "kind", "dropout"),
    [
        ("nfs", KINDS[0], 0.0),
        ("slora", KINDS[0], 0.3),
        ("bd", KINDS[1], 0.3),
        ("bd", KINDS[2], 0.0),
        ("bd", Kind(8, blocks=8), 0.0),
    ],
    ids=["nfs", "slora", "two blocks", "four blocks", "eight blocks"],
)
def test_gradients_are_those_of_one_process(
    ranks: Ranks, folder: str, strategy: str, kind: Kind, dropout: float
) -> None:
    _check_gradients(ranks, folder, strategy, kind, dropout)


OTHERS = {
    "cohere": "nfs",
    "gemma2": "slora",
    "glm": "nfs",
    "gpt2": "slora",
    "phi": "nfs",
    "phi3": "slora",
    "starcoder2": "slora",
}


@pytest.mark.parametrize("family", in_turns(list(OTHERS), always=("gpt2",)))
def test_gradients_of_other_layers(two: Ranks, tmp_path: Path, family: str) -> None:
    tiny_family(family).save_pretrained(tmp_path)
    _check_gradients(two, str(tmp_path), OTHERS[family], KINDS[0], 0.2)


def _check_gradients(ranks: Ranks, folder: str, strategy: str, kind: Kind, dropout: float) -> None:
    loss, whole, norm = gradients(None, folder, strategy, kind, dropout)
    for found_loss, found, found_norm in ranks.run(gradients, folder, strategy, kind, dropout):
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert found_norm == pytest.approx(norm, rel=1e-4)
        assert found.keys() == whole.keys()
        for site, both in whole.items():
            for got, expected in zip(found[site], both, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


DORA = Kind(8, dora=True)


@pytest.mark.parametrize(
    ("strategy", "kind"), [("nfs", KINDS[0]), ("slora", KINDS[0]), ("bd", KINDS[2]), ("nfs", DORA), ("slora", DORA)]
)
def test_a_job_has_the_losses_and_the_weights_of_one_process(
    ranks: Ranks, folder: str, strategy: str, kind: Kind
) -> None:
    expected = train(None, folder, strategy, kind)
    first, *others = ranks.run(train, folder, strategy, kind)
    _same(first, expected)
    for found in others:
        assert (found.losses, found.norms) == (first.losses, first.norms), "bit for bit"
        assert found.state.keys() == first.state.keys()
        for name, tensor in first.state.items():
            own = found.state[name]
            assert own.shape == tensor.shape and torch.equal(own, tensor.where(own != 0, 0)), "zeros but for its shard"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind", "dropout"), [("nfs", KINDS[0], 0.0), ("slora", KINDS[0], 0.2), ("bd", KINDS[2], 0.0)]
)
def test_a_job_by_the_kernels_of_a_gpu(folder: str, two: Ranks, strategy: str, kind: Kind, dropout: float) -> None:
    """In Triton's interpreter. They add gradients to the optimizer's sums themselves, but for fully sharded pairs."""
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    expected = train(None, folder, strategy, kind, 0, 1, None, "grouped", dropout)
    _same(two.run(train, folder, strategy, kind, 0, 1, None, "segmented", dropout)[0], expected)


@pytest.mark.parametrize("kind", [KINDS[2], DORA], ids=["bd", "dora"])
def test_a_checkpoint_of_ranks_continues_in_one_process_and_the_other_way_round(
    ranks: Ranks, folder: str, kind: Kind
) -> None:
    straight = train(None, folder, "bd", kind)
    by_ranks, alone = ranks.run(train, folder, "bd", kind, 0, 2)[0], train(None, folder, "bd", kind, 0, 2)
    assert by_ranks.state.keys() == alone.state.keys()
    _same(train(None, folder, "bd", kind, 2, 3, by_ranks.state), straight)
    _same(ranks.run(train, folder, "bd", kind, 2, 3, alone.state)[0], straight)


class Copies(TorchDispatchMode):
    """Counts copies of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def copies(mesh: Mesh, folder: str, kind: Kind) -> tuple[int, bool]:
    """How many copies the beginning of a snapshot takes, and whether rank 0 has all of the state."""
    base = load(folder, mesh)
    whole = whole_adapter(base.spec, kind)
    optimizer = AdapterOptimizer(whole, base.spec, TrainingSettings(), base.dtype, partition=base.partition(whole))
    assert optimizer.host.rows, "memory that a thread allocates"
    with Copies() as counted:
        tensors = optimizer.snapshot()
    state = tensors()
    same = all(torch.equal(state[f"weights/{site}.a"], pair.a_RD) for site, pair in whole.sites.items())
    return counted.count, same or mesh.rank > 0


def test_a_state_is_gathered_by_as_few_copies_for_many_sites_as_for_one(two: Ranks, folder: str) -> None:
    """Requests wait for it meanwhile. A thread puts the shards to their places."""
    many, few = two.run(copies, folder, Kind(8)), two.run(copies, folder, Kind(8, targets=("q_proj",)))
    assert many == few == [(3, True)] * 2, "one for each kind of state"


def served(mesh: Mesh, folder: str, strategy: str) -> list[bool]:
    """Whether this rank makes the shards that requests read alike of a snapshot, whose other shards it does not know,
    and of the whole adapter."""
    base = load(folder, mesh, strategy)
    whole = whole_adapter(base.spec, DORA)
    partition = base.partition(whole, learns=True)
    optimizer = AdapterOptimizer(
        whole, base.spec, TrainingSettings(), base.dtype, partition=partition, row_norms=base.row_norms
    )
    found, expected = base.served(optimizer.adapter(optimizer.snapshot()(), WEIGHTS)).sites, base.served(whole).sites
    pairs = [(found[site], expected[site]) for site in expected]
    return [
        torch.equal(one, other)
        for own, right in pairs
        for one, other in zip((own.a_RD, own.b_OR, own.scale_O), (right.a_RD, right.b_OR, right.scale_O), strict=True)
        if one is not None and other is not None
    ]


@pytest.mark.parametrize("strategy", ["nfs", "slora"])
def test_a_snapshot_of_dora_is_served_as_its_files_are(two: Ranks, folder: str, strategy: str) -> None:
    for alike in two.run(served, folder, strategy):
        assert len(alike) == 3 * 7 * LAYERS and all(alike)


def _same(found: Trained, expected: Trained) -> None:
    """In the steps that `found` made, and in the state after the last one."""
    steps = len(found.losses)
    assert found.losses == pytest.approx(expected.losses[-steps:], rel=1e-4)
    assert found.norms == pytest.approx(expected.norms[-steps:], rel=1e-3)
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-3, atol=1e-3)
