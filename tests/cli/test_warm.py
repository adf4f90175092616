"""`coserve warm`, over a stand-in for the compiling processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.cli.warm import REPEAT, SETTINGS, WarmProgress
from coserve.config import Config
from coserve.engine.warmup import launch
from coserve.engine.warmup.key import shape_key
from tests.support.examples import by_day

INTERRUPTED = """
import subprocess, sys
from coserve.cli.app import main
from coserve.engine.warmup import launch

def compile_ahead(config, progress):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        progress(1, 3)
        print(child.pid, flush=True)
        child.wait()
    finally:
        child.kill()
        child.wait()

launch.compile_ahead = compile_ahead
sys.argv = ["coserve", "warm", "bundled"]
main()
"""


def progress_text(*, terminal: bool, steps: list[tuple[float, int, int]]) -> str:
    """What is shown for reports of (time, done, total)."""
    now = 0.0
    console = Console(force_terminal=terminal, width=100, color_system=None)
    with console.capture() as shown, WarmProgress(console, lambda: now) as progress:
        for now, done, total in steps:  # noqa: B007
            progress.show(done, total)
    return shown.get()


def test_lines_with_the_time_left_where_there_is_no_terminal() -> None:
    steps = [(1.0, 2, 12), (2.0, 3, 12), (1.0 + REPEAT, 4, 12), (1.5 + REPEAT, 5, 12), (99.0, 12, 12)]
    lines = progress_text(terminal=False, steps=steps).splitlines()
    # Two were there already; 5 s for the two others leaves 20 s for the eight that are missing.
    assert lines == [
        "compiling kernels 2/12",
        "compiling kernels 4/12, about 20 s left",
        "compiling kernels 12/12, about 0 s left",
    ]


def test_a_bar_with_the_time_left_on_a_terminal() -> None:
    text = progress_text(terminal=True, steps=[(0.0, 0, 12), (5.0, 2, 12)])
    assert "━" in text and "2/12" in text and "about 25 s left" in text


def test_the_settings_of_warm_are_those_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []

    def compile_ahead(config: Config, progress: Callable[[int, int], None]) -> None:
        seen.append(config)
        progress(0, 2)
        progress(2, 2)

    monkeypatch.setattr(launch, "compile_ahead", compile_ahead)
    (tmp_path / "serve.toml").write_text('page_tokens = 32\nport = 9\nmodel = "other"\n')
    options = ["--dtype", "bfloat16", "--cache-dir", str(tmp_path), "--config", str(tmp_path / "serve.toml")]
    result = CliRunner().invoke(app, ["warm", "some/model", *options])
    assert result.exit_code == 0, result.output
    assert "warm: 2 of 2 in 0 s" in result.output
    found = seen[0]
    assert (found.model, found.dtype, found.cache_dir) == ("some/model", "bfloat16", tmp_path)
    assert (found.page_tokens, found.port) == (32, 9)
    assert set(SETTINGS) < set(Config.__dataclass_fields__)


@pytest.mark.parametrize("policy", ["slack", "ets", "ts", "spatial"])
def test_every_setting_that_decides_which_kernels_are_needed_is_an_option(policy: str) -> None:
    before = Config(policy=policy)
    for f in fields(Config):
        value = getattr(before, f.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            other = value / 2 if isinstance(value, float) else max(1, value - 1)
            changed = replace(before, **{f.name: other})
            assert f.name in SETTINGS or shape_key(changed) == shape_key(before), f.name


def test_help_has_its_options_and_no_others() -> None:
    text = CliRunner().invoke(app, ["warm", "--help"]).output
    assert "warm [OPTIONS] [MODEL]" in text and "--step-tokens N" in text
    assert "--port" not in text and "Logging:" in text and "Requests and files:" not in text


def test_a_cache_that_is_not_full_ends_with_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "compile_ahead", lambda config, progress: progress(1, 2))
    result = CliRunner().invoke(app, ["warm"])
    assert result.exit_code == 1
    assert "warm: 1 of 2" in result.output


def test_without_a_gpu_it_ends_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coserve", "warm", "bundled"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("coserve: ") and "GPU" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", by_day([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_stop_ends_the_compiling_processes(number: int) -> None:
    warm = subprocess.Popen(
        [sys.executable, "-P", "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert warm.stdout is not None
    child = int(warm.stdout.readline())
    warm.send_signal(number)
    _, said = warm.communicate(timeout=240)
    assert warm.returncode == 130
    assert "Traceback" not in said, said
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
