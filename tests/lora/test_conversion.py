"""From LoRA to BD-LoRA and back: each shard is the nearest one of its rank, and the report says what is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import BdLoraConfig, PeftModel

from coserve.core.errors import CorruptAdapter, InvalidRequest
from coserve.core.schemas.adapters import ConversionReport
from coserve.core.types import AdapterRef
from coserve.lora.files.conversion import THREADS, ConversionOptions, convert_adapter
from coserve.lora.files.record import record_adapter
from coserve.lora.store.files import load_adapter
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from tests.support.examples import by_day
from tests.support.lora_reference import adapted, alone, save_peft, tokens_of
from tests.support.tiny_models import tiny_model

TOKENS = tokens_of(11)
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
PLAIN = {
    "r": 3,
    "use_rslora": True,
    "target_modules": "all-linear",
    "rank_pattern": {"up_proj": 5},
    "alpha_pattern": {"0.self_attn.o_proj": 3, "k_proj": 30},
}
BLOCKS = {
    "r": 8,
    "target_modules": "all-linear",
    "use_bdlora": BdLoraConfig(
        nblocks=4, target_modules_bd_a=["o_proj", "down_proj"], target_modules_bd_b=list(COLUMN)
    ),
}


@pytest.fixture
def base() -> Base:
    return wrap_base(tiny_model("llama"), name="tiny")


def converted(base: Base, folder: Path, *, threads: int = THREADS, **options: object) -> ConversionReport:
    """Converts folder/in to folder/out."""
    (folder / "out").mkdir(exist_ok=True)
    record = record_adapter(folder / "in", AdapterRef("a", 1), base.spec, source="import", created_at=0.0)
    wanted = ConversionOptions(**options)
    return convert_adapter(folder / "in", folder / "out", base.spec, wanted, record.digests, threads=threads)


def load(base: Base, folder: Path) -> LoraWeights:
    return load_adapter(folder, base.spec, dtype=torch.float32)


def updates(weights: LoraWeights) -> dict[str, torch.Tensor]:
    """The dense (O, D) update of each site."""
    dense = {site: pair.dense() for site, pair in weights.sites.items()}
    return {site: pair.scaling * pair.b_OR.double() @ pair.a_RD.double() for site, pair in dense.items()}


def nearest(update: torch.Tensor, blocks: int, rank: int, *, rows: bool) -> torch.Tensor:
    """By the SVD of each shard of the update itself."""
    shards = []
    for shard in update.chunk(blocks, 0 if rows else 1):
        u, s, vt = torch.linalg.svd(shard, full_matrices=False)
        shards.append(u[:, :rank] * s[:rank] @ vt[:rank])
    return torch.cat(shards, 0 if rows else 1)


@pytest.mark.parametrize("settings", by_day({"plain": PLAIN, "bd": BLOCKS}, "plain"))
@pytest.mark.parametrize(("blocks", "rank"), [(2, 4), (4, 4), (2, 2), (1, 2)])
def test_each_shard_is_the_nearest_of_its_rank(
    base: Base, tmp_path: Path, settings: dict[str, object], blocks: int, rank: int
) -> None:
    save_peft(tiny_model("llama"), tmp_path / "in", **settings)
    report = converted(base, tmp_path, bd_blocks=blocks, rank=rank)
    before, weights = updates(load(base, tmp_path / "in")), load(base, tmp_path / "out")
    wrong = whole = 0.0
    for site, update in updates(weights).items():
        want = nearest(before[site], blocks, rank // blocks, rows=site.endswith(COLUMN))
        torch.testing.assert_close(update, want, rtol=1e-4, atol=1e-4 * float(before[site].norm()))
        wrong, whole = wrong + float((update - before[site]).square().sum()), whole + float(before[site].square().sum())
        error = float((update - before[site]).norm() / before[site].norm())
        assert report.site_errors[site] == pytest.approx(error, abs=1e-4)
        pair = weights.sites[site]
        assert (pair.a_blocks, pair.b_blocks) == ((1, blocks) if site.endswith(COLUMN) else (blocks, 1))
        assert pair.rank == rank
    assert report.rank == rank == weights.settings.r
    assert report.error == pytest.approx((wrong / whole) ** 0.5, abs=1e-4)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_without_an_error_the_logits_are_the_same_here_and_in_peft(base: Base, tmp_path: Path, blocks: int) -> None:
    model = save_peft(tiny_model("llama"), tmp_path / "in", **PLAIN)
    report = converted(base, tmp_path, bd_blocks=blocks, max_error=0.0)
    assert report.error == pytest.approx(0, abs=1e-6)
    assert report.rank == report.smallest_rank == 5 * blocks  # the largest of its sites, in each shard
    ranks = {site.rsplit(".", 1)[-1]: pair.rank for site, pair in load(base, tmp_path / "out").sites.items()}
    assert (ranks["up_proj"], ranks["q_proj"]) == (5 * blocks, 3 * blocks), "no site has more than it can use"
    want = alone(model, TOKENS)
    found = adapted(base, load(base, tmp_path / "out"), TOKENS)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    again = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path / "out")).eval()
    torch.testing.assert_close(alone(again, TOKENS), want, rtol=1e-4, atol=1e-4)


def test_threads_change_nothing(base: Base, tmp_path: Path) -> None:
    save_peft(tiny_model("llama"), tmp_path / "in", **PLAIN)
    files, reports = [], []
    for threads in (1, 3):
        reports.append(converted(base, tmp_path, threads=threads, bd_blocks=2, max_error=0.3))
        files.append((tmp_path / "out" / "adapter_model.safetensors").read_bytes())
        (tmp_path / "out" / "adapter_model.safetensors").unlink()
    assert files[0] == files[1] and reports[0] == reports[1]


def test_a_block_diagonal_adapter_keeps_its_rank_at_its_own_blocks(base: Base, tmp_path: Path) -> None:
    save_peft(tiny_model("llama"), tmp_path / "in", **BLOCKS)
    assert converted(base, tmp_path, bd_blocks=4, max_error=0.0).rank == 8


def test_the_rank_is_the_smallest_within_the_bound(base: Base, tmp_path: Path) -> None:
    save_peft(tiny_model("llama"), tmp_path / "in", **PLAIN)
    report = converted(base, tmp_path, bd_blocks=2, max_error=0.3)
    assert report.error <= 0.3 < report.errors.get(report.rank - 2, 1.0)
    assert list(report.errors) == sorted(report.errors) and report.errors[10] == pytest.approx(0, abs=1e-6)
    (tmp_path / "out" / "adapter_model.safetensors").unlink()
    default = converted(base, tmp_path, bd_blocks=2)
    assert default.max_error == 0.05 and default.error <= 0.05 and default.rank == default.smallest_rank


def test_an_adapter_of_zeros_can_be_converted(base: Base, tmp_path: Path) -> None:
    save_peft(tiny_model("llama"), tmp_path / "in", r=4, lora_alpha=0, target_modules=["q_proj"])
    report = converted(base, tmp_path, bd_blocks=2)
    assert (report.rank, report.error) == (2, 0.0)
    assert not any(update.any() for update in updates(load(base, tmp_path / "out")).values())


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"bd_blocks": 3}, "bd_blocks", "does not divide into 3 blocks"),
        ({"bd_blocks": 100}, "bd_blocks", "expected 1 to 64"),
        ({"bd_blocks": 4, "rank": 6}, "rank", "expected a multiple of 4"),
        ({"bd_blocks": 4, "rank": 0}, "rank", "expected a multiple of 4"),
        ({"bd_blocks": 4, "rank": 4, "max_error": 0.01}, "rank", "an error of at most 0.01 takes rank"),
    ],
)
def test_what_cannot_be_done_is_refused(
    base: Base, tmp_path: Path, options: dict[str, object], field: str, message: str
) -> None:
    save_peft(tiny_model("llama"), tmp_path / "in", **PLAIN)
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refused:
        converted(base, tmp_path, **options)
    assert refused.value.field == field
    assert list((tmp_path / "out").iterdir()) == []


def test_fused_modules_are_refused(tmp_path: Path) -> None:
    save_peft(tiny_model("phi3"), tmp_path / "in", r=4, target_modules=["qkv_proj"])
    base = wrap_base(tiny_model("phi3"), name="tiny")
    with pytest.raises(InvalidRequest, match="neither column- nor row-parallel"):
        converted(base, tmp_path, bd_blocks=2)
    assert converted(base, tmp_path, bd_blocks=1, rank=2).rank == 2  # a smaller plain one needs no cut


def test_files_that_changed_since_are_refused(base: Base, tmp_path: Path) -> None:
    save_peft(tiny_model("llama"), tmp_path / "in", **PLAIN)
    record = record_adapter(tmp_path / "in", AdapterRef("a", 1), base.spec, source="import", created_at=0.0)
    save_peft(tiny_model("llama"), tmp_path / "in", seed=1, **PLAIN)
    with pytest.raises(CorruptAdapter, match="not the one that was registered"):
        convert_adapter(tmp_path / "in", tmp_path, base.spec, ConversionOptions(2), record.digests)
