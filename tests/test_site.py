"""The documentation's site: its pages, and what its guides show is run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coserve.core.schemas.jobs import FinetuneRequest
from coserve.core.training.settings import TrainingRequest
from coserve.core.types import LoraRequest
from tests.support.daemon_process import DaemonProcess
from tests.support.examples import marks_on_days

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CONFIG = ROOT / "tools" / "mkdocs.yml"
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    text = "".join(code for language, _, code in FENCE.findall(page.read_text()) if language == "console")
    return [line[2:] for line in text.splitlines() if line.startswith("$ ")]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"[\w/-]+\.md", CONFIG.read_text().partition("\nnav:\n")[2])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs here (make docs installs it)")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(CONFIG), "-d", str(tmp_path)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html")
        built = tmp_path / (name.with_name("index.html") if name.name == "README.html" else name)
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)", built.read_text())
        assert not loaded, name
    assert "sailor" in (tmp_path / "search" / "search_index.json").read_text()


def test_the_start_shows_commands_of_pages_that_are_run() -> None:
    others = (ROOT / "README.md", DOCS / "guide/install.md", DOCS / "guide/serve.md")
    run = {re.sub(r"\s+#.*", "", command) for page in others for command in commands(page)}
    assert set(commands(DOCS / "index.md")) <= run


def test_the_fields_beside_llama_factorys_exist() -> None:
    types = {"": FinetuneRequest, "lora": LoraRequest, "training": TrainingRequest}
    rows = re.findall(r"^\| `[^|]+\| ([^|]+) \|", (DOCS / "guide/from-llama-factory.md").read_text(), re.MULTILINE)
    shown = [name for cell in rows for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(shown) > 20
    for name in shown:
        part, _, field = name.rpartition(".")
        assert field in types[part].__struct_fields__, name


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon on the bundled base, with as many processes as the parameter says."""
    options = ("--tp", str(request.param))
    with DaemonProcess(Path("bundled"), tmp_path_factory.mktemp("site") / "data", options=options) as process:
        process.wait_ready()
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "daemon"),
    [
        ("first-adapter", 1),
        pytest.param("from-openai", 1, marks=marks_on_days(0)),
        pytest.param("latency-targets", 1, marks=marks_on_days(2)),
        pytest.param("several-gpus", 2, marks=marks_on_days(5)),
    ],
    indirect=["daemon"],
)
def test_what_a_guide_shows_runs_from_top_to_bottom(guide: str, daemon: DaemonProcess, tmp_path: Path) -> None:
    """Files, shell commands and Python, in one folder; only the daemon's address is another, and it runs already."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    environ = os.environ | {"COSERVE_URL": daemon.url, "PATH": path}
    said = ""
    for language, name, code in FENCE.findall((DOCS / f"guide/{guide}.md").read_text()):
        if name:
            (tmp_path / name).write_text(code)
            continue
        script = code.replace("http://localhost:8000", daemon.url)
        script = re.sub(r"^\$ (\w+=\S+ )?coserve (serve|lora-server) .*$", "", script, flags=re.MULTILINE)
        shell = ["bash", "-e", "-c", re.sub(r"^\$ ", "", script, flags=re.MULTILINE)]
        command = shell if language == "console" else [sys.executable, "-P", "-c", script]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, (code, done.stderr)
        said += done.stdout
    if guide == "first-adapter":
        assert "Please reset your password" in said, said
        assert (tmp_path / "support-peft" / "adapter_config.json").is_file()
    elif guide == "latency-targets":
        assert said.startswith("slack 2.0 0.2\n") and "In the limits" in said, said
        assert re.search("^True (length|stop)$", said, re.MULTILINE), said  # it is sampled
    elif guide == "several-gpus":
        assert said.count("Its keeper is Ada Quill") >= 1 and "plain-bd2" in said, said
    else:
        assert said.startswith("succeeded\n") and said.endswith("\nfirst\n['message', 'message', 'message']\n"), said
