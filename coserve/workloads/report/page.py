"""The report as one self-contained HTML page: pictures and styles are inline."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from importlib import resources

from jinja2 import Environment

from coserve.workloads.replay import ReplayResult
from coserve.workloads.scenario import Scenario

Tables = Mapping[str, Sequence[Sequence[str]]]


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
