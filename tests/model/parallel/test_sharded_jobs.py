"""Jobs on several ranks are those of one process, and their files go from one number of ranks to another."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from coserve.core.names import ADAPTER_WEIGHTS
from coserve.core.training.jobs import Teacher
from coserve.core.training.settings import DpoLoss, KtoLoss
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.lora.files.peft import QUANTIZATION
from coserve.lora.files.tensorfile import digest_file
from tests.support import sharded, sharded_jobs
from tests.support.ranks import Ranks

BD: dict[str, object] = {"r": 8, "bd_blocks": 2}
DORA: dict[str, object] = {"r": 8, "use_dora": True}
KTO: dict[str, object] = {"loss": KtoLoss(beta=0.3), "micro_batch_tokens": 32}
DPO: dict[str, object] = {"loss": DpoLoss(beta=0.3), "micro_batch_tokens": 32}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sharded.save_base(tmp_path_factory.mktemp("base"), intermediate_size=96)


def run(
    ranks: Ranks | None, base: str, root: Path, until: int = 4, *, quantization: str = "none", **changes: object
) -> sharded_jobs.Trained:
    """On one process, or on all ranks, whose results are equal."""
    if ranks is None:
        return sharded_jobs.train(None, base, str(root), until, changes, quantization)
    first, *others = ranks.run(sharded_jobs.train, base, str(root), until, changes, quantization)
    assert all(other == first for other in others), "bit for bit"
    found: sharded_jobs.Trained = first
    return found


def adapter(root: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    folder = root / "adapters" / "learned" / "1"
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


def same_adapter(one: Path, other: Path) -> None:
    (found, config), (expected, expected_config) = adapter(one), adapter(other)
    assert config == expected_config
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, BD, DPO, KTO, DORA], ids=["lora", "bd", "dpo", "kto", "dora"])
def test_a_job_on_two_ranks_is_that_of_one_process_at_every_step(
    two: Ranks, base: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    alone = run(None, base, tmp_path / "alone", **changes)
    for name, first, second in (("both", two, two), ("there", two, None), ("back", None, two)):
        root = tmp_path / name
        run(None, base, root, until=0, **changes)  # places the corpus
        begun = run(first, base, root, until=2, **changes)
        ended = run(second, base, root, **changes)
        assert (begun.resumed, ended.resumed) == (0, 2)
        assert begun.losses + ended.losses == pytest.approx(alone.losses, rel=1e-4), name
        assert begun.valid + ended.valid == pytest.approx(alone.valid, rel=1e-4), name
        same_adapter(root, tmp_path / "alone")


@pytest.mark.slow
def test_a_job_of_a_quantised_base_goes_from_one_number_of_ranks_to_another(
    two: Ranks, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    base = sharded.save_base(
        tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128, head_dim=16, num_key_value_heads=4
    )
    alone = run(None, base, tmp_path / "alone", quantization="nf4")
    run(None, base, tmp_path / "both", until=0, quantization="nf4")
    begun = run(two, base, tmp_path / "both", until=2, quantization="nf4")
    ended = run(None, base, tmp_path / "both", quantization="nf4")
    assert begun.losses + ended.losses == pytest.approx(alone.losses, rel=1e-4)
    same_adapter(tmp_path / "both", tmp_path / "alone")
    metadata = [
        safe_open(tmp_path / name / "adapters" / "learned" / "1" / ADAPTER_WEIGHTS, "np").metadata()
        for name in ("both", "alone")
    ]
    assert metadata[0] == metadata[1] and metadata[0][QUANTIZATION] == "nf4"


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "taught"), [({}, BD), (BD, BD), ({}, DORA)], ids=["lora", "bd", "of dora"])
def test_a_distillation_on_two_ranks_is_that_of_one_process(
    two: Ranks, base: str, tmp_path: Path, changes: dict[str, object], taught: dict[str, object]
) -> None:
    run(None, base, tmp_path, **(taught | {"learning_rate": 0.1}))
    folder, ref = tmp_path / "adapters" / "learned" / "1", AdapterRef("learned", 1)
    teacher = Teacher(ref=ref, digests=AdapterDigests(digest_file(folder, ADAPTER_WEIGHTS)), rank=8)
    patience = {"early_stopping_patience": 4}  # all steps: the first ones may be worse than the start
    job = {"id": "job-2", "adapter": "student", "teacher": teacher, "seed": 9, **patience, **changes}
    run(None, base, tmp_path, until=0, **job)
    shutil.copytree(tmp_path, tmp_path / "alone", ignore=shutil.ignore_patterns("alone"))
    alone, found = run(None, base, tmp_path / "alone", **job), run(two, base, tmp_path, **job)
    assert found.losses == pytest.approx(alone.losses, rel=1e-3)
    assert [found.valid_before, *found.valid] == pytest.approx([alone.valid_before, *alone.valid], rel=1e-3)
    assert alone.valid_before is not None and alone.valid_before > 1e-3, "the teacher is not the base"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, BD, DORA], ids=["lora", "bd", "dora"])
def test_a_preference_that_continues_an_adapter_on_two_ranks_is_that_of_one_process(
    two: Ranks, base: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    run(None, base, tmp_path, **({"learning_rate": 0.1} | changes))
    start = AdapterRef("learned", 1)
    job = {"id": "job-2", "adapter": "preferred", "init_from": start, "dropout": 0.0, "learning_rate": 0.03}
    job |= DPO | changes
    run(None, base, tmp_path, until=0, **job)
    shutil.copytree(tmp_path, tmp_path / "alone", ignore=shutil.ignore_patterns("alone"))
    alone = run(None, base, tmp_path / "alone", **job)
    begun, ended = run(two, base, tmp_path, until=2, **job), run(two, base, tmp_path, **job)
    assert begun.losses + ended.losses == pytest.approx(alone.losses, rel=1e-3)
    assert begun.losses[0] == alone.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert alone.losses[-1] < 0.68, "it has moved away from its reference"


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_four(two: Ranks, base: str, tmp_path: Path) -> None:
    alone = run(None, base, tmp_path / "alone")
    run(None, base, tmp_path / "four", until=0)
    run(two, base, tmp_path / "four", until=2)
    with Ranks(4) as four:
        ended = run(four, base, tmp_path / "four")
    assert ended.losses == pytest.approx(alone.losses[2:], rel=1e-4)
    same_adapter(tmp_path / "four", tmp_path / "alone")


@pytest.mark.slow
def test_ranks_measure_their_memory_together(two: Ranks, base: str) -> None:
    two.run(sharded_jobs.profile, base)


def test_blocks_that_fit_no_rank_are_refused(two: Ranks, base: str, tmp_path: Path) -> None:
    run(None, base, tmp_path, until=0, r=8, bd_blocks=2)
    with pytest.raises(AssertionError, match=r"expected bd_blocks that 2 GPUs divide"):
        run(two, base, tmp_path, r=6, bd_blocks=3, targets=("down_proj",))
