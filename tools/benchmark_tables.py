"""Write the numbers of docs/benchmarks.md and README.md from benchmarks/results/summary.json.

python -m tools.benchmark_tables

A row that begins with a key of the summary gets its value, its target and the verdict; all other words stay. The first
number of a cell is written to the decimals that it shows, a share also as a percentage. An empty cell of a new row,
such as "| `documents.recovered` | | | |", is filled. In all other lines a comment with a key, "1.23 <!-- some.key -->",
makes the last number before it that key's value; a dash is replaced too, and stays until there is one. The words before
"<!-- run of some.key -->" become the commit and the day at which the key was measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
SUMMARY: dict[str, dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "summary.json").read_text())
ROW = re.compile(r"\| `([\w.+]+)`")
MARK = re.compile(r"([^|>]*)<!-- ([\w.+]+) -->")
RUN = re.compile(r"(?:–|\w{8} of [\d-]{10}) <!-- run of ([\w.+]+) -->")
NUMBER = re.compile(r"([-+−]?)\d[\d,]*(?:\.(\d+))?(%?)")
CELL = re.compile(r"(?<!\\)\|")
VERDICT = re.compile(r"\b(reached|missed)\b")


def written(page: str) -> str:
    """Return the page with the numbers of the summary. Raises `ValueError` for a cell that has words and no number."""
    return "\n".join(_row(line) for line in page.split("\n"))


def _row(line: str) -> str:
    found = ROW.match(line)
    if found is None or (entry := SUMMARY.get(found.group(1))) is None:
        return RUN.sub(_run, MARK.sub(_marked, line))
    key, value, unit = found.group(1), entry["value"], entry["unit"]
    cells = CELL.split(line)  # "", the key, the value, perhaps a target, others, ""
    cells[2] = _shown(key, cells[2], value, unit)
    bound = re.match(r"([<>])= ([-\d.]+)", entry["target"] or "")
    if bound is None or len(cells) < 5:
        return "|".join(cells)
    limit, most = float(bound.group(2)), bound.group(1) == "<"
    cells[3] = _shown(key, cells[3], limit, unit, "≤ " if most else "≥ ")
    verdict = "reached" if (value <= limit if most else value >= limit) else "missed"
    if len(cells) > 5 and not cells[4].strip() and not VERDICT.search(line):
        cells[4] = f" {verdict} "
    cells[3:] = [VERDICT.sub(verdict, cell, count=1) for cell in cells[3:]]
    return "|".join(cells)


def _marked(found: re.Match[str]) -> str:
    text, key = found.groups()
    if (entry := SUMMARY.get(key)) is None:
        return found.group()
    at = max([each.start() for each in (*NUMBER.finditer(text), *re.finditer("–", text))], default=0)
    shown = _shown(key, text[at:], entry["value"], entry["unit"])
    return f"{text[:at]}{shown.lstrip() if at else shown}<!-- {key} -->"


def _run(found: re.Match[str]) -> str:
    if (entry := SUMMARY.get(found.group(1))) is None:
        return found.group()
    rows = json.loads((ROOT / entry["result"]).read_text())["rows"].values()
    commit = next(row["commit"] for row in rows if row["date"] == entry["date"])
    return f"{commit[:8]} of {entry['date'][:10]} <!-- run of {found.group(1)} -->"


def _shown(key: str, cell: str, value: float, unit: str, before: str = "") -> str:
    """Return the cell with this value as its first number; an empty one and a dash get it in three digits."""
    if cell.strip() in ("", "–"):
        share = unit in ("fraction", "share")
        plain = f"{value:.2f}" if unit == "ratio" else f"{value:.3g}"
        text = f"{value:.1%}" if share else f"{value:,.0f}" if abs(value) >= 1000 else plain
        return f" {before}{text} "
    found = NUMBER.search(cell)
    if found is None:
        raise ValueError(f"{key}: expected a number in {cell.strip()!r}")
    sign, decimals, percent = found.groups()
    scaled, places = value * (100 if percent else 1), len(decimals or "")
    shown = float(found.group().rstrip("%").replace(",", "").replace("−", "-"))
    if abs(scaled - shown) <= 0.5 * 10.0**-places + 1e-9:  # halfway between two it may be rounded either way
        return cell
    text = f"{scaled:{sign if sign == '+' else ''},.{places}f}{percent}"
    return cell[: found.start()] + text + cell[found.end() :]


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each.read_text()))
