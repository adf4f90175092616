"""`summary.json` is what the results say, and the documents say what `summary.json` does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bdlora import predict as bdlora_predict
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

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY: dict[str, dict[str, Any]] = json.loads((RESULTS / "summary.json").read_text())
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
ALONE = {
    "adapter_steps.json",
    "adapters_many.json",
    "documents.json",
    "families.json",
    "house.json",
    "house_finetuning.json",
    "http_paced.json",
    "imports.json",
    "json_valid.json",
    "kill.json",
    "memory_mixes.json",
    "moe.json",
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


@pytest.mark.parametrize("name", sorted(ALONE))
def test_values_are_in_the_result(name: str) -> None:
    found = set(numbers(json.loads((RESULTS / name).read_text())))
    own = {key: entry["value"] for key, entry in SUMMARY.items() if Path(entry["result"]).name == name}
    assert own and not {key: value for key, value in own.items() if value not in found}


@pytest.mark.slow
def test_the_summary_follows_from_the_results(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "summary.json").unlink()
    kernel_summary.summarize(tmp_path, tmp_path)
    serving_results.summarize("serving.json", tmp_path)
    http_report.summarize(tmp_path)
    stall_report.summarize(tmp_path)
    bdlora_results.summarize(tmp_path, [])
    bdlora_predict.summarize(tmp_path)
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


def table_rows() -> list[tuple[str, list[str]]]:
    """Rows of docs/benchmarks.md that begin with a key of the summary: the key, and the other cells."""
    rows = []
    for line in BENCHMARKS.splitlines():
        match = re.match(r"\| `([\w.+]+)`", line)
        if match and match.group(1) in SUMMARY:
            rows.append((match.group(1), [cell.strip() for cell in line.strip("|").split("|")][1:]))
    return rows


def first_number(text: str) -> tuple[float, float] | None:
    """The first number of a cell and half of its last decimal; a percentage as a share."""
    match = re.search(r"([-+−]?\d[\d,]*(\.\d+)?)(%?)", text)
    if match is None:
        return None
    number, decimals, percent = match.groups()
    scale = 0.01 if percent else 1.0
    half = 0.5 * 10.0 ** -(len(decimals) - 1 if decimals else 0)
    return scale * float(number.replace(",", "").replace("−", "-")), scale * half


def test_tables_show_the_values_of_their_keys() -> None:
    """To the decimals that they show; a share may be a percentage."""
    rows = table_rows()
    assert len(rows) > 25
    wrong = {}
    for key, cells in rows:
        shown, value = first_number(cells[0]), SUMMARY[key]["value"]
        if shown is None:  # such as "not within 74"
            wrong[key] = cells[0]
            continue
        number, half = shown
        if abs(number - value) > half + 1e-9:
            wrong[key] = f"{cells[0]}, but {value}"
    assert not wrong


def test_tables_say_whether_targets_are_reached() -> None:
    for key, cells in table_rows():
        target = SUMMARY[key]["target"]
        verdict = " ".join(cells[1:])
        if target is None or not re.match(r"[<>]= ", target) or not re.search(r"\b(reached|missed)\b", verdict):
            continue
        bound, value = float(target[3:]), SUMMARY[key]["value"]
        reached = value <= bound if target.startswith("<=") else value >= bound
        reached = reached and "lower bound" not in SUMMARY[key].get("note", "")
        assert ("reached" in verdict) == reached, key


def test_the_readme_shows_one_result() -> None:
    """Its table, by load: fine-tuning, the share within targets and TTFT of the default policy; fine-tuning and share
    of vLLM and PEFT."""
    text = (ROOT / "README.md").read_text().partition("## Measured\n")[2].partition("\n## ")[0]
    results = json.loads((RESULTS / "equal_loads.json").read_text())["rows"]
    table = re.findall(r"^\| (\d+) requests/s(, strict)? \|(.*)\|$", text, re.MULTILINE)
    assert len(table) == 4
    for rate, strict, cells in table:
        ours, theirs = (
            results[f"r{rate}{kind}"] for kind in (f"{'.strict' * bool(strict)}.coserve.overlap", ".vllm+peft")
        )
        trained, kept, ttft, beside = cells.split("|")
        assert ours["commit"][:8] in text and theirs["commit"][:8] in text
        assert trained.strip() == f"{ours['finetune_tok_s']:,.0f} tokens/s"
        assert (kept.strip(), ttft.strip()) == (f"{ours['in_slo']:.0%}", f"{ours['ttft_ms']['p50']:.0f} ms")
        share = theirs["in_slo_strict" if strict else "in_slo"]
        assert f"{share:.1%}".replace("0.0%", "0%") in beside and (
            strict or f"{theirs['finetune_tok_s']:,.0f} " in beside
        )
    assert f"{results['peak.coserve.overlap']['value']:,.0f} tokens/s" in text
