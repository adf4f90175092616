"""What the benchmarks make of their measurements: rows of several runs in one file, the summary's keys, idle time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common.results import Results, Target, merge_results, summarize
from benchmarks.serving.idle import idle_of


def results(out: Path, revision: str = "c0ffee") -> Results:
    return Results(
        out,
        "serving.json",
        script="benchmarks.serving.in_process",
        hardware="none",
        seed=0,
        revision=revision,
        settings={},
    )


def rows(out: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((out / "serving.json").read_text())["rows"]
    return found


def test_targets() -> None:
    assert Target(5.0).reached(5.0)
    assert not Target(5.0).reached(4.9)
    assert Target(0.05, most=True).reached(0.05)
    assert not Target(0.05, most=True).reached(0.051)
    assert str(Target(0.05, most=True)) == "<= 0.05"


def test_a_run_leaves_the_rows_of_others(tmp_path: Path) -> None:
    results(tmp_path, "first").put("a", 1.0, "s")
    results(tmp_path, "first").put("b", 2.0, "s")
    results(tmp_path, "second").put("b", 3.0, "s", Target(4.0), [2.5, 3.0, 3.5])
    found = rows(tmp_path)
    assert {key: (row["value"], row["commit"]) for key, row in found.items()} == {
        "a": (1.0, "first"),
        "b": (3.0, "second"),
    }
    assert (found["b"]["low"], found["b"]["high"], found["b"]["reached"]) == (2.5, 3.5, False)


def test_results_of_another_machine_replace_older_rows_only(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    results(here).put("old", 1.0, "s")
    results(here).put("kept", 1.0, "s")
    results(there).put("old", 2.0, "s")
    record = json.loads((there / "serving.json").read_text())
    record["rows"]["kept"] = record["rows"]["old"] | {"value": 9.0, "date": "2000-01-01T00:00:00+00:00"}
    record["rows"]["old"]["date"] = "2999-01-01T00:00:00+00:00"
    (there / "serving.json").write_text(json.dumps(record))
    merge_results(there / "serving.json", here)
    assert {key: row["value"] for key, row in rows(here).items()} == {"old": 2.0, "kept": 1.0}
    runs = json.loads((here / "serving.json").read_text())["runs"]
    assert {row["run"] for row in rows(here).values()} <= set(runs)


def test_a_clean_row_takes_the_note_of_the_one_before_away(tmp_path: Path) -> None:
    key = "serving.decode_tok_s.b64.a0"
    (tmp_path / "summary.json").write_text(json.dumps({key: {"note": "not clean"}, "other": {"note": "stays"}}))
    done = results(tmp_path)
    done.put(key, 100.0, "output tok/s", Target(90.0))
    summarize("serving.json", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "note" not in summary[key]
    assert summary[key]["target"] == ">= 90"
    assert summary["other"] == {"note": "stays"}


def test_idle_time_is_what_no_kernel_covers() -> None:
    """Kernels that overlap count once, whatever their order."""
    found = idle_of([(40.0, 90.0), (0.0, 10.0), (5.0, 8.0), (12.0, 20.0), (18.0, 30.0)], 2, 50e-6)
    assert found.idle == pytest.approx(12 / 90, abs=1e-4)
    assert found.short == pytest.approx(2 / 90, abs=1e-4)
    assert found.longest_us == 10.0
    assert found.step_ms == pytest.approx(0.045)
    assert found.idle_unprofiled == pytest.approx(1 - 39 / 50, abs=1e-4)
