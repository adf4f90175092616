"""`summary.json` is what the results say, and the documents say what `summary.json` does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.bdlora import quality as bdlora_quality
from benchmarks.bdlora import results as bdlora_results
from benchmarks.common import results as serving_results
from benchmarks.ets import figure_5_1_report
from benchmarks.ets import report as ets_report
from benchmarks.finetuning import quality as finetune_quality
from benchmarks.finetuning import report as finetuning_report
from benchmarks.kernels import summary as kernel_summary
from benchmarks.memory import vram_profile
from benchmarks.peers import equal_report
from benchmarks.serving import http_report, stall_report
from tools.benchmark_tables import MARK, PAGES, ROW, SUMMARY, written

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ALONE = {
    "adapter_registration.json",
    "adapter_steps.json",
    "adapter_tiers.json",
    "adapters_many.json",
    "cpu_decode.json",
    "disaggregated_2.json",
    "documents.json",
    "documents_reader.json",
    "families.json",
    "http_paced.json",
    "imports.json",
    "json_valid.json",
    "latents.json",
    "kill.json",
    "memory_mixes.json",
    "moe.json",
    "offline.json",
    "openapi_cases.json",
    "page.json",
    "ping_pong.json",
    "plan_error.json",
    "quant.json",
    "recurrent.json",
    "schema_cost.json",
    "served.json",
    "soak.json",
    "tinker.json",
}
"""Results whose scripts put their keys into the summary when they measure, or publish one run."""


def numbers(content: object) -> Iterator[float]:
    """Every number in a result."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        for each in content:
            yield from numbers(each)
    elif isinstance(content, int | float):
        yield float(content)


def test_every_key_names_its_script_and_its_result() -> None:
    for key, entry in SUMMARY.items():
        assert (ROOT / entry["script"]).exists() and (ROOT / entry["result"]).exists(), key


@pytest.mark.parametrize("name", sorted(name for name in ALONE if (RESULTS / name).exists()))
def test_values_are_in_the_result(name: str) -> None:
    found = set(numbers(json.loads((RESULTS / name).read_text())))
    own = {key: entry["value"] for key, entry in SUMMARY.items() if Path(entry["result"]).name == name}
    assert own and not {key: value for key, value in own.items() if value not in found}


def test_results_name_commits_of_the_history() -> None:
    """Measured before a rebase, a row says so in a note."""
    log = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    history = log.stdout.split()
    if log.returncode or (ROOT / ".git" / "shallow").exists():
        pytest.skip("needs the whole history")
    unknown = {
        (path.name, row["commit"])
        for path in RESULTS.glob("*.json")
        if isinstance(content := json.loads(path.read_text()), dict) and isinstance(content.get("rows"), dict)
        for row in content["rows"].values()
        if "commit" in row
        and "rebased" not in row.get("note", "")
        and not any(each.startswith(row["commit"]) for each in history)
    }
    assert not unknown


@pytest.mark.slow
def test_the_summary_follows_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are composed, and not rendered: that takes four fifths of the time."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "summary.json").unlink()
    kernel_summary.summarize(tmp_path, tmp_path)
    for name in ("serving.json", stall_report.FILE):
        serving_results.summarize(name, tmp_path)
    http_report.summarize(tmp_path)
    bdlora_results.summarize(tmp_path, [])
    figure_5_1_report.publish(tmp_path, tmp_path / "figure.png")
    bdlora_quality.publish(tmp_path, tmp_path / "figure.png")
    for report, file in (
        (ets_report, ets_report.FILE),
        (equal_report, equal_report.FILE),
        (vram_profile, vram_profile.NAME),
        (finetune_quality, finetune_quality.NAME),
    ):
        if (tmp_path / file).exists():
            report.publish(tmp_path, tmp_path / "figure.png")
    if (tmp_path / finetuning_report.FILE).exists():
        finetuning_report.publish(tmp_path)
    made = json.loads((tmp_path / "summary.json").read_text())
    expected = {key: entry for key, entry in SUMMARY.items() if Path(entry["result"]).name not in ALONE}
    assert made == expected


def test_the_pages_have_the_numbers_of_the_summary() -> None:
    """Values, targets and verdicts, in rows that begin with a key, and numbers before a comment with one: `python -m
    tools.benchmark_tables` writes them."""
    benchmarks, readme = (page.read_text() for page in PAGES)
    assert len(re.findall(ROW, benchmarks)) > 25 and len(re.findall(MARK, readme)) > 25
    assert written(benchmarks) == benchmarks
    assert written(readme) == readme


def test_numbers_are_written_as_they_were_shown() -> None:
    key, other = "kernels.train_bwd_overhead", "start.cold.ready_s"
    overhead, seconds = SUMMARY[key]["value"], SUMMARY[other]["value"]
    page = f"| `{key}` | 99% | ≤ 1% | missed; by hand: 7 |\n| `{other}` | | | |\n| `no.key` | 1 |\nwords 3"
    lines = [f"| `{key}` | {overhead:.0%} | ≤ 22% | reached; by hand: 7 |"]
    lines += [f"| `{other}` | {seconds:.3g} | ≤ 75 | missed |", "| `no.key` | 1 |", "words 3"]
    assert written(page) == "\n".join(lines)
    with pytest.raises(ValueError, match=f"{key}: expected a number in 'fast'"):
        written(f"| `{key}` | fast |")


def test_marked_numbers_are_the_last_before_their_key() -> None:
    key = "kernels.train_bwd_overhead"
    shown = f"{SUMMARY[key]['value']:.1%}"
    assert written(f"| 8 x 512 | of 8: 99.9% <!-- {key} --> | – <!-- {key} --> | – <!-- no.key --> |") == (
        f"| 8 x 512 | of 8: {shown} <!-- {key} --> | {shown} <!-- {key} --> | – <!-- no.key --> |"
    )
    assert written(f"alone 1% <!-- {key} -->, then 2.0% <!-- {key} -->.").count(shown) == 1


def test_a_run_is_named_by_its_commit_and_day() -> None:
    key = "h200.peers.ft_tok_s.r5"
    row = json.loads((RESULTS / "equal_loads_h200.json").read_text())["rows"]["r5.vllm+peft"]
    named = f"at {row['commit'][:8]} of {row['date'][:10]} <!-- run of {key} -->."
    assert written(f"at – <!-- run of {key} -->.") == named
    assert written(named) == named
    assert written("at – <!-- run of no.key -->.") == "at – <!-- run of no.key -->."


def test_the_readme_names_the_commits_of_its_numbers() -> None:
    text = PAGES[1].read_text().partition("## Measured\n")[2].partition("\n## ")[0]
    for _, key in re.findall(MARK, text):
        if key in SUMMARY:
            entry = SUMMARY[key]
            rows = json.loads((ROOT / entry["result"]).read_text())["rows"].values()
            commits = {row["commit"][:8] for row in rows if row["date"] == entry["date"]}
            assert commits and all(commit in text for commit in commits), key
