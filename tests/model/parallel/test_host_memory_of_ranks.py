"""Host memory that a job's state takes on several ranks: what is counted, and no more while files are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coserve.admission.shapes import BLOCK, gathered_bytes, lora_shapes, pinned_bytes
from coserve.core.training.settings import Optimizer, TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.lora.store.tensor_writer import write_tensors
from coserve.model.parallel.mesh import LoneRank
from tests.support.live_bytes import LiveBytes
from tests.support.sharded import load, save_base

LORA, RANKS = LoraSettings(r=1024), 2
"""Its rows of state take two blocks each."""


def optimizer_of(folder: Path, rank: int) -> AdapterOptimizer:
    base = load(save_base(folder, hidden_size=512, intermediate_size=1024), LoneRank(rank, RANKS))
    whole = new_adapter(LORA, base.spec, seed=1, dtype=torch.float32, device="cpu")
    return AdapterOptimizer(whole, base.spec, TrainingSettings(), base.dtype, partition=base.partition(whole))


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_a_rank_keeps_for_checkpoints_is_counted(tmp_path: Path, rank: int) -> None:
    """Rank 0 has all of the state once, another rank its own shards."""
    base = load(save_base(tmp_path, hidden_size=512, intermediate_size=1024)).spec
    own, whole = lora_shapes(LORA, base, ranks=RANKS), lora_shapes(LORA, base)
    state = 3 * 4 * sum(sum(each.parts) for each in (own if rank else whole))
    counted = (
        pinned_bytes(own, Optimizer.ADAMW, early_stopping=False)
        if rank
        else gathered_bytes(own, whole, RANKS, Optimizer.ADAMW, early_stopping=False)
    )
    with LiveBytes() as memory:
        optimizer = optimizer_of(tmp_path, rank)
        before = memory.now()
        assert optimizer.host.rows
        held = memory.now() - before
    assert state <= held <= counted


def test_a_checkpoint_of_ranks_is_written_a_block_at_a_time(tmp_path: Path) -> None:
    with LiveBytes() as memory:
        optimizer = optimizer_of(tmp_path, 0)
        tensors = optimizer.snapshot()
        memory.reset()
        before = memory.now()
        write_tensors(tmp_path / "state", tensors())
        assert memory.now() == before
        assert memory.peak() - before <= 4 * BLOCK
    state = load_file(tmp_path / "state")
    assert sum(own.nbytes for own in state.values()) > 3 * 4 * BLOCK, "more than a block of each kind"
