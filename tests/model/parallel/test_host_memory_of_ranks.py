"""Host memory that a job's state takes, also on several ranks: what is counted, and hardly more while it is written or
published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coserve.admission.optimizers import WEIGHTS
from coserve.admission.recompute_plan import host_bytes
from coserve.admission.shapes import BLOCK, gathered_bytes, lora_shapes, pinned_bytes
from coserve.core.cancellation import Cancellation
from coserve.core.training.settings import Optimizer, TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings
from coserve.finetune.init import initial_weights, new_adapter
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.publication import served_copy, write_files
from coserve.lora.store.host_memory import HostMemory
from coserve.lora.store.packing import packed_bytes
from coserve.lora.store.reading import PART
from coserve.lora.store.store import AdapterStore
from coserve.lora.store.tensor_writer import write_tensors
from coserve.model.base import Base
from coserve.model.parallel.mesh import LoneRank
from coserve.state.folder import DataFolder
from tests.support.finetuning import Bench, job_spec, random_corpus
from tests.support.live_bytes import LiveBytes
from tests.support.sharded import load, save_base

LORA, RANKS = LoraSettings(r=1024), 2
"""Its rows of state take two blocks each."""


def sharded(folder: Path, rank: int) -> Base:
    """Both ranks share a key/value head: each has all of its B."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 1}
    return load(save_base(folder, **sizes), LoneRank(rank, RANKS))


def optimizer_of(base: Base) -> AdapterOptimizer:
    whole = new_adapter(LORA, base.spec, seed=1, dtype=torch.float32, device="cpu")
    return AdapterOptimizer(whole, base.spec, TrainingSettings(), base.dtype, partition=base.partition(whole))


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_a_rank_keeps_for_checkpoints_is_counted(tmp_path: Path, rank: int) -> None:
    """Rank 0 has all of the state once, another rank its own shards."""
    base = sharded(tmp_path, rank)
    own, whole = lora_shapes(LORA, base.spec, ranks=RANKS), lora_shapes(LORA, base.spec)
    state = 3 * 4 * sum(sum(each.parts) for each in (own if rank else whole))
    counted = (
        pinned_bytes(own, Optimizer.ADAMW, early_stopping=False)
        if rank
        else gathered_bytes(own, whole, RANKS, Optimizer.ADAMW, early_stopping=False)
    )
    with LiveBytes() as memory:
        optimizer = optimizer_of(base)
        before = memory.now()
        assert optimizer.host.rows
        held = memory.now() - before
    assert state <= held <= counted


def test_a_job_on_a_cpu_takes_what_is_counted(tmp_path: Path) -> None:
    base, corpus = load(save_base(tmp_path / "base", hidden_size=512, intermediate_size=1024)), random_corpus()
    bench, spec = Bench(base, tmp_path), job_spec(corpus, r=LORA.r, checkpoint_steps=1)
    bench.place(corpus, spec)
    state = sum(4 * sum(shape.parts) for shape in lora_shapes(LORA, base.spec))
    with LiveBytes() as memory:
        bench.trainer.load(spec, Cancellation())()
        started = memory.peak()
        while not bench.trainer.checkpoint_due(spec.id):
            bench.trainer.advance(spec.id, None)
        bench.trainer.checkpoint(spec.id)
        held = memory.now()
    counted = host_bytes(spec, base.spec, ranks=1, fully_sharded=False)
    assert 8 * state <= held <= counted, "weights, two moments, gradients, what forwards read, and three copies"
    assert started <= counted


def test_a_checkpoint_of_ranks_is_written_a_block_at_a_time(tmp_path: Path) -> None:
    with LiveBytes() as memory:
        optimizer = optimizer_of(sharded(tmp_path, 0))
        tensors = optimizer.snapshot()
        memory.reset()
        before = memory.now()
        write_tensors(tmp_path / "state", tensors())
        assert memory.now() == before
        assert memory.peak() - before <= 4 * BLOCK
    state = load_file(tmp_path / "state")
    assert sum(own.nbytes for own in state.values()) > 3 * 4 * BLOCK, "more than a block of each kind"


@pytest.mark.parametrize("rank", [None, *range(RANKS)])
def test_an_adapter_is_published_a_pair_at_a_time(tmp_path: Path, rank: int | None) -> None:
    base = sharded(tmp_path / "base", rank or 0)
    if rank is None:
        base = load(str(tmp_path / "base"))
    pair = 4 * max(sum(each.parts) for each in lora_shapes(LORA, base.spec))
    memory = HostMemory(256 << 20, for_kernels=True)
    store = AdapterStore(lambda *_: pytest.fail("nothing is read"), 1 << 30, memory=memory)
    with LiveBytes() as live:
        assert memory.allocate(1).parts, "seen by the meter"
        optimizer = optimizer_of(base)
        weights = optimizer.adapter(optimizer.snapshot()(), WEIGHTS)
        live.reset()
        before = live.now()
        served = served_copy(weights, base, store)
        assert served is not None
        assert live.peak() - before <= 4 * BLOCK + 4 * pair, "of one chunk of a rank's, and copies of one pair"
        assert live.now() - before <= 4 * BLOCK and memory.outside == 0
        if not rank:
            live.reset()
            write_files(AdapterRef("one", 1), weights, base, DataFolder(tmp_path))
            assert live.peak() - before <= 4 * BLOCK + pair
    assert packed_bytes(served) > 3 * pair
    for site, own in base.served(weights).sites.items():
        assert torch.equal(served.sites[site].a_RD, own.a_RD.to(base.dtype))
        assert torch.equal(served.sites[site].b_OR, own.b_OR.to(base.dtype))


@pytest.mark.parametrize("continues", [False, True])
def test_a_rank_begins_a_job_and_reads_an_adapter_with_its_shards_alone(tmp_path: Path, *, continues: bool) -> None:
    base, ref = sharded(tmp_path / "base", 1), AdapterRef("one", 1)
    folder = DataFolder(tmp_path)
    whole = new_adapter(LORA, base.spec, seed=3, dtype=torch.float32, device="cpu")
    expected = base.shard(whole).sites
    write_files(ref, whole, base, folder)
    spec = job_spec(random_corpus(), seed=3, r=LORA.r, init_from=ref if continues else None)
    with LiveBytes() as live:
        start = initial_weights(spec, base, folder)
        own = sum(pair.a_RD.nbytes + pair.b_OR.nbytes for pair in start.part.sites.values())
        assert live.now() <= own + (1 << 20)
        assert live.peak() <= own + (PART if continues else 32 << 20)
        optimizer = AdapterOptimizer(
            start.whole,
            base.spec,
            TrainingSettings(),
            base.dtype,
            partition=base.partition(start.whole),
            part=start.part,
        )
    for found in (start.part, optimizer.masters()):
        assert all(torch.equal(found.sites[site].a_RD, pair.a_RD) for site, pair in expected.items())
        assert all(torch.equal(found.sites[site].b_OR, pair.b_OR) for site, pair in expected.items())
