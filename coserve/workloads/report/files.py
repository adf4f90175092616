"""Writes the files of a report: JSON, a plot, and one self-contained HTML page with its pictures and styles inline."""

from __future__ import annotations

import base64
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec
from jinja2 import Environment

from coserve.core.errors import InvalidRequest
from coserve.core.types import Wire
from coserve.workloads.replay import ReplayResult
from coserve.workloads.report.plot import plot_png
from coserve.workloads.report.tables import (
    ADAPTER_HEADER,
    CLASS_HEADER,
    FAILURE_HEADER,
    LATENCY_HEADER,
    adapter_rows,
    class_rows,
    failure_rows,
    latency_rows,
    totals_rows,
)
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import Summary

Tables = Mapping[str, Sequence[Sequence[str]]]


class Report(Wire, frozen=True):
    """The content of the JSON file. `server`: the server that was measured."""

    summary: Summary
    run: ReplayResult
    server: str = "coserve"


def check_folder(folder: Path) -> None:
    """Create the folder of a report. Raises `InvalidRequest` if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidRequest(f"cannot write into the folder {str(folder)!r}: {reason}", field="report") from error


def write_report(folder: Path, run: ReplayResult, summary: Summary, server: str = "coserve") -> list[Path]:
    """Write `report.json`, `report.png` and `report.html` to `folder`, creating it if needed, and return their
    paths."""
    folder.mkdir(parents=True, exist_ok=True)
    json, plot, html = (folder / f"report.{kind}" for kind in ("json", "png", "html"))
    content = msgspec.json.encode(Report(summary=summary, run=run, server=server))
    json.write_bytes(msgspec.json.format(content, indent=1))
    picture = plot_png(run, summary)
    plot.write_bytes(picture)
    tables: dict[str, list[tuple[str, ...]]] = {
        "Latency of the requests": [LATENCY_HEADER, *latency_rows(summary)],
        "Totals": list(totals_rows(summary)),
        "Classes": [CLASS_HEADER, *class_rows(summary)] if len(summary.classes) > 1 else [],
        "Failures": [FAILURE_HEADER, *failures] if (failures := list(failure_rows(summary))) else [],
        "Adapters": [ADAPTER_HEADER, *adapter_rows(summary)],
    }
    html.write_text(page(run, server, tables, picture), encoding="utf-8")
    return [json, plot, html]


def page(run: ReplayResult, server: str, tables: Tables, picture: bytes) -> str:
    """Return the HTML. `tables`: rows of cells by title; in tables of more than two columns the first row is the
    header."""
    text = resources.files("coserve").joinpath("assets/report.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    return template.render(
        server=server,
        tables={title: rows for title, rows in tables.items() if rows},
        picture=base64.b64encode(picture).decode(),
        settings=_changed(run.scenario),
    )


def _changed(scenario: Scenario) -> dict[str, str]:
    """Return the settings that differ from the defaults."""
    fields = dataclasses.fields(Scenario)
    values = {f.name: getattr(scenario, f.name) for f in fields if getattr(scenario, f.name) != f.default}
    return {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in values.items()
    }
