"""The files in `deploy/`: the image, the systemd unit and Grafana's dashboard name only what there is."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coserve.api.http.limits import STREAMS_TIMEOUT
from coserve.api.metrics.prometheus import Metrics
from coserve.cli.app import COMMANDS
from coserve.cli.daemon.engine_process import STOP_TIMEOUT
from coserve.config import Config

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SETTINGS = {f"COSERVE_{field.name.upper()}" for field in dataclasses.fields(Config)}


def test_the_image_copies_what_there_is_and_runs_a_command_as_nobody() -> None:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    for name, rest in steps:
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and source in kept, source
    assert not [source for source in kept if not (ROOT / source).exists()]
    of = dict(steps)  # the last of each
    assert of["USER"].strip() == "coserve" and [name for name, _ in steps].count("FROM") == 2
    assert json.loads(of["ENTRYPOINT"])[0] == "coserve" and json.loads(of["ENTRYPOINT"])[1] in COMMANDS
    assert set(re.findall(r"COSERVE_\w+", of["ENV"])) <= SETTINGS
    probe = json.loads(of["HEALTHCHECK"].partition("CMD ")[2])[-1]
    compile(probe, "healthcheck", "exec")
    assert "'/health'" in probe and of["EXPOSE"].strip() in probe


def test_the_image_is_built_as_images_should_be() -> None:
    """What linters of Dockerfiles ask for."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    names, last = [name for name, _ in steps], len(steps) - 1 - [name for name, _ in steps][::-1].index("FROM")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least, beyond = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    for name, rest in steps:
        if name == "FROM":
            version = re.fullmatch(r"python:3\.(\d+)-slim-\w+(?: AS \w+)?", rest)
            assert version is not None and least <= int(version[1]) < beyond, "a Python that the package supports"
        if name == "RUN" and "apt-get" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest
        if name == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest and "-c constraints.txt" in rest
        if name in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list), "as a list: the daemon gets the signal, not a shell"
    assert "ADD" not in names
    user = names.index("USER")
    assert user > last and "apt-get" not in "".join(rest for _, rest in steps[user:]), "nothing runs as root at the end"
    assert dict(steps)["VOLUME"] in dict(steps)["ENV"].partition("COSERVE_DATA_DIR=")[2]
    secrets = re.compile("KEY|TOKEN|PASSWORD|SECRET")
    assert not [rest for name, rest in steps if name in ("ENV", "ARG") and secrets.search(rest)]


def test_what_the_image_imports_at_its_build_is_there() -> None:
    (code,) = re.findall(r'RUN python -c "(.*)"', (DEPLOY / "Dockerfile").read_text())
    for module in code.removeprefix("import ").split(", "):
        assert importlib.util.find_spec(module) is not None, module


def test_the_unit_gives_the_daemon_time_to_stop(tmp_path: Path) -> None:
    text = (DEPLOY / "coserve.service").read_text()
    assert set(re.findall(r"(COSERVE_\w+)=\S*[ \n]", text.partition("[Unit]")[2])) <= SETTINGS
    assert re.search(r"ExecStart=\S+/coserve (\w+)", text)[1] in COMMANDS  # type: ignore[index]
    seconds = int(re.search(r"TimeoutStopSec=(\d+)", text)[1])  # type: ignore[index]
    assert seconds > Config().drain_seconds + STREAMS_TIMEOUT + STOP_TIMEOUT
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "coserve.service"
    unit.write_text(text.replace("/opt/coserve/bin/coserve", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    families = list(text_string_to_metric_families(Metrics(lambda: "base").page(restarts=0).decode()))
    reference = (ROOT / "docs/reference/metrics.md").read_text()  # it also has those that an engine reports
    known = set(re.findall(r"^\| `(coserve_\w+)`", reference, re.MULTILINE)) | {each.name for each in families}
    known |= {f"{name}_bucket" for name in known}
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    names = {variable["name"] for variable in board["templating"]["list"]}
    ids, places = set(), set()
    for panel in board["panels"]:
        ids.add(panel["id"])
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
        for target in panel["targets"]:
            used = set(re.findall(r"coserve_\w+", target["expr"]))
            assert used and used <= known, used - known
            assert target["expr"].count('{instance=~"$instance"}') == len(re.findall(r"coserve_\w+", target["expr"]))
            grouped = re.search(r"by \(([\w, ]+)\)", target["expr"])
            shown = {*re.findall(r"{{(\w+)}}", target["legendFormat"]), *(grouped[1].split(", ") if grouped else ())}
            assert shown <= labels | {"le", "use", "cause", "status", "state"}, shown
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= names | {"__rate_interval"}
    assert len(ids) == len(places) == len(board["panels"])
