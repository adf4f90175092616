"""The help of `serve` and the output of `config`: complete, readable in 80 columns, and a file that loads back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve import __version__
from coserve.cli.app import app
from coserve.cli.settings import toml_lines
from coserve.config import Config, load_config, sections, setting_sources


def shown(*args: str, columns: int = 80, **environ: str) -> str:
    result = CliRunner().invoke(app, [*args], env={"COLUMNS": str(columns), **environ})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_of_serve_has_sections_types_choices_and_defaults(columns: int) -> None:
    text = shown("serve", "--help", columns=columns)
    lines = text.splitlines()
    assert all(len(line) <= columns for line in lines if not line.lstrip().startswith("--"))
    assert "…" not in text
    flat = " ".join(text.split())
    for title in sections():
        assert f"{title}:" in lines
    for f in dataclasses.fields(Config):
        assert f"--{f.name.replace('_', '-')}" in text
        if f.metadata["choices"]:
            assert "|".join(f.metadata["choices"]) in text
        if f.default not in (None, ()) and not isinstance(f.default, bool):
            assert f"[default: {f.default}]" in flat
    assert "--policy auto|slack|ets|ts" in text and "--port N" in text and "--data-root PATH" in text
    assert "--recompute / --no-recompute" in text and "[default: false]" in flat


SHARES = "memory_fraction", "train_floor", "train_weight", "training_sm_share", "slo_attainment"


def test_numbers_have_units() -> None:
    """A time says seconds, an amount of memory or text says bytes or tokens; the others count what their help names."""
    for f in dataclasses.fields(Config):
        if isinstance(f.default, float) and f.name not in SHARES:
            assert "seconds" in f.metadata["help"], f.name
        for unit in ("tokens", "bytes"):
            if f.name.endswith(f"_{unit}"):
                assert unit in f.metadata["help"], f.name


def test_every_setting_is_in_one_section() -> None:
    assert [name for names in sections().values() for name in names] == [f.name for f in dataclasses.fields(Config)]


def test_help_loads_no_torch() -> None:
    commands = [[], ["serve"], ["bench"], ["finetune"], ["jobs", "list"], ["config"]]
    code = (
        f"import sys\nfrom coserve.cli import app\nfor command in {commands!r}:\n"
        "    try: app([*command, '--help'])\n    except SystemExit: pass\n"
        "    assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules), command"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    assert shown("--version") == f"coserve {__version__}\n"


ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {
        "COSERVE_MODEL": 'a "quoted" \\ modèle \x7f',
        "COSERVE_RECOMPUTE": "true",
        "COSERVE_ALLOWED_HOSTS": "a.example,b.example",
        "COSERVE_KV_TOKENS": "77",
        "COSERVE_SLO_TPOT": "0.05",
        "COSERVE_DATA_ROOT": "/srv/päth with space",
    },
]


@pytest.mark.parametrize("environ", ENVIRONMENTS)
def test_what_config_prints_is_a_file_that_loads_back(environ: dict[str, str], tmp_path: Path) -> None:
    config = load_config({}, environ)
    file = tmp_path / "coserve.toml"
    file.write_text("\n".join(toml_lines(config, setting_sources({}, environ))), encoding="utf-8")
    tomllib.loads(file.read_text(encoding="utf-8"))
    again = load_config({"config": file}, {})
    assert dataclasses.replace(again, config=None) == config


def test_config_says_where_values_come_from_and_hides_secrets(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("ts_n = 3\n")
    secret = "hush-hush-hush-hush"
    text = shown("config", "--config", str(file), COSERVE_PORT="4321", COSERVE_API_KEY=secret)
    assert f"ts_n = 3  # {file}" in text
    assert "port = 4321  # COSERVE_PORT" in text
    assert 'policy = "auto"  # default' in text
    assert secret not in text and '# api_key = "***"' in text
    assert "api_key" not in tomllib.loads(text)
    assert "# threads is not set" in text
