"""The wheel, installed by itself outside of the repository: it has all files of the package, and serves."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
SOURCES = ("coserve", "examples", "deploy", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the wheel alone; what it depends on is that of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "venv"
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, source]
    subprocess.run(build, check=True, timeout=300)
    subprocess.run([sys.executable, "-P", "-m", "venv", "--without-pip", environment], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    install = [
        *pip,
        "--python",
        environment / "bin/python",
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        wheel,
    ]
    subprocess.run(install, check=True, timeout=300)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A path file in a folder that a path file names is not read: the repository stays unknown.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    yield environment


def run(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("COSERVE_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_the_wheel_has_every_file_of_the_package(installed: Path, tmp_path: Path) -> None:
    asked = "import coserve; print(coserve.__path__[0])"
    found = Path(run(installed / "bin/python", "-P", "-c", asked, cwd=tmp_path).strip())
    assert found.is_relative_to(installed)

    def files(folder: Path) -> set[str]:
        paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(folder).as_posix() for path in paths}

    assert files(ROOT / "coserve") == files(found)
    for name in ("examples", "deploy"):
        assert files(ROOT / name) == files(installed / "share/coserve" / name)


def test_the_command_serves_trains_and_generates(installed: Path, tmp_path: Path) -> None:
    coserve = installed / "bin/coserve"
    assert "finetune" in run(coserve, "--help", cwd=tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Today we", "completion": " sighted land."}))
    python = installed / "bin/python"
    with DaemonProcess(Path("bundled"), tmp_path / "data", environ={"PYTHONPATH": ""}, python=python) as daemon:
        daemon.wait_ready()
        run(coserve, "finetune", "sailor", "rows.jsonl", "--steps", "2", "--url", daemon.url, cwd=tmp_path)
        run(coserve, "generate", "Today we", "--adapter", "sailor", "--url", daemon.url, cwd=tmp_path)
        assert daemon.call("GET", "/health")[1]["engine_alive"]
        assert daemon.call("GET", "/openapi.json")[1]["info"]["title"] == "coserve"
        assert daemon.stop() == 0
