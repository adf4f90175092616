"""Losses of coserve against PEFT: the comparison, and that both sides train alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bdlora.quality import read_corpus
from benchmarks.finetuning.quality import NAME, TRIED, by_coserve, by_peft, differences, padded, publish, start_of
from coserve.data.corpus.tokenized import Corpus
from coserve.model.load import load_base


def row(side: str, seed: int, value: float, *losses: float) -> dict[str, Any]:
    found = {"dtype": "float32", "side": side, "seed": seed, "value": value, "training": list(losses)}
    return found | {"date": "2026-11-23"}


ROWS = [
    row("coserve", 0, 2.5, 4.0, 3.25),
    row("peft", 0, 2.0, 4.5, 3.5),
    row("coserve", 1, 3.0, 4.0, 3.0),
    row("peft", 1, 3.0, 4.0, 3.0),
    row("coserve", 2, 1.0, 4.0, 3.0),
]


def test_differences_are_of_seeds_that_both_sides_have() -> None:
    assert differences(ROWS) == {
        "float32": {
            "validation": [0.5, 0.0],
            "training": [-0.25, 0.0],
            "largest_step": 0.5,
            "seeds_std": pytest.approx(0.5**0.5, abs=1e-6),
        }
    }


def test_keys_and_a_figure_are_published(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"runs": {}, "rows": {str(i): each for i, each in enumerate(ROWS)}}))
    publish(tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finetune.quality.delta.float32"]["value"] == 0.25


def test_padding_is_no_target() -> None:
    tokens, target = np.arange(1, 6, dtype=np.int32), np.array([0, 1, 1, 0, 1], np.uint8)
    ids_BL, mask_BL, labels_BL = padded(Corpus(tokens, target, np.array([0, 3, 5])), [0, 1], "cpu")
    assert ids_BL.tolist() == [[1, 2, 3], [4, 5, 0]] and mask_BL.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert labels_BL.tolist() == [[2, 3, -100], [5, -100, -100]]


@pytest.mark.slow
def test_both_sides_train_alike_in_float32() -> None:
    corpus, held = read_corpus()
    base = load_base("bundled", device="cpu", dtype="float32")
    ours = by_coserve(TRIED, 0, base, corpus, held)
    theirs = by_peft(TRIED, 0, "float32", "cpu", start_of(base, 0), corpus, held)
    assert ours.training == pytest.approx(theirs.training, abs=1e-3)
    assert ours.validation == pytest.approx(theirs.validation, abs=1e-3)
