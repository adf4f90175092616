"""The help of `serve` and the output of `config`: complete, readable in 80 columns, and a file that loads back; and
what is said of variables that set nothing and of settings without effect."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve import __version__
from coserve.cli.app import app
from coserve.cli.daemon.start_warnings import POLICIES_OF, start_warnings
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


KUBERNETES = {
    "COSERVE_SERVICE_HOST": "10.0.0.1",
    "COSERVE_SERVICE_PORT": "80",
    "COSERVE_SERVICE_PORT_HTTP": "80",
    "COSERVE_PORT": "tcp://10.0.0.1:80",
    "COSERVE_PORT_8000_TCP": "tcp://10.0.0.1:80",
    "COSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    "COSERVE_DB_SERVICE_HOST": "10.0.0.2",
    "COSERVE_DB_PORT": "tcp://10.0.0.2:5432",
    "COSERVE_DB_PORT_5432_TCP_PROTO": "tcp",
}


def warnings(environ: dict[str, str] | None = None, **given: object) -> list[str]:
    environ = environ or {}
    return start_warnings(load_config(given, environ), given, environ)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("COSERVE_KV_TOKEN", "; did you mean 'COSERVE_KV_TOKENS'?"),
        ("COSERVE_MAX_RUNING", "; did you mean 'COSERVE_MAX_RUNNING'?"),
        ("COSERVE_MAX_NUM_SEQS", "; did you mean 'COSERVE_MAX_RUNNING'?"),
        ("COSERVE_ENFORCE_EAGER", "; --compile off runs without compiled layers and CUDA graphs"),
        ("COSERVE_ZZZ", ""),
        ("COSERVE_DB_PORT", ""),
    ],
)
def test_an_unknown_variable_is_named_with_the_setting_it_means(name: str, meant: str) -> None:
    assert warnings({name: "1"}) == [f"{name} is no setting{meant}"]


def test_variables_of_the_client_and_of_kubernetes_are_left_alone() -> None:
    assert warnings({"COSERVE_URL": "http://x", "COSERVE_MODEL": "m", "KV_TOKEN": "1"} | KUBERNETES) == []


@pytest.mark.parametrize("policy", ["slack", "inference-first", "spatial", "overlap"])
def test_a_batch_size_that_the_policy_does_not_read(policy: str) -> None:
    said = f"inference_batch_size has no effect with policy {policy!r}, only with ets or ts"
    assert warnings(policy=policy, inference_batch_size=8) == [said]
    assert warnings({"COSERVE_INFERENCE_BATCH_SIZE": "8"}, policy=policy) == [said]
    assert warnings(policy=policy) == []


def test_auto_reads_what_the_policies_it_stands_for_read() -> None:
    assert warnings(policy="auto", overlap_steps="between", train_weight=0.5) == []
    assert warnings(policy="auto", device="cpu", overlap_steps="between") == [
        "overlap_steps has no effect with policy 'auto', only with overlap"
    ]
    assert len(warnings(policy="auto", tp=2, overlap_steps="between")) == 1
    assert warnings(policy="auto", ts_n=5) == ["ts_n has no effect with policy 'auto', only with ts"]


@pytest.mark.parametrize("policy", ["ets", "ts"])
def test_a_batch_that_max_running_bounds_and_the_reverse(policy: str) -> None:
    assert warnings(policy=policy, inference_batch_size=256) == warnings(policy=policy, max_running=8) == []
    (said,) = warnings(policy=policy, inference_batch_size=300)
    assert said == "inference_batch_size 300 is above max_running: a batch has at most 256 requests"
    (said,) = warnings(policy=policy, max_running=100)
    assert said.startswith("max_running 100 is above inference_batch_size:") and "at most 64 requests" in said


def test_settings_of_single_policies_are_settings_with_policies() -> None:
    for name, policies in POLICIES_OF.items():
        value = getattr(Config(), name)
        assert warnings(policy=policies[0], **{name: value}) == []
        other = next(one for one in ("inference-first", "ets") if one not in policies)
        assert len(warnings(policy=other, **{name: value})) == 1


def test_settings_that_others_make_useless() -> None:
    assert warnings(lora_sharding="slora") == ["lora_sharding has no effect on one GPU, only with tp above 1"]
    assert warnings(lora_sharding="slora", tp=2) == warnings(memory_fraction=0.5) == warnings(compile="off") == []
    assert warnings(memory_fraction=0.5, kv_tokens=64) == ["memory_fraction has no effect with kv_tokens"]
    found = warnings(device="cpu", compile="off", pinned_memory_bytes=1 << 20)
    assert found == ["compile has no effect on a CPU", "pinned_memory_bytes has no effect on a CPU"]


def test_config_shows_them_as_comments() -> None:
    environ = {"COSERVE_MAXQUEUE": "1", "COSERVE_TS_N": "3"}
    result = CliRunner().invoke(app, ["config"], env=environ)
    assert "# COSERVE_MAXQUEUE is no setting; did you mean 'COSERVE_MAX_QUEUE'?" in result.output
    assert "# ts_n has no effect with policy 'auto', only with ts" in result.output
    assert tomllib.loads(result.output)["max_queue"] == 1024


def test_serve_logs_each_once(tmp_path: Path) -> None:
    environ = os.environ | {"COSERVE_LOG_FORMATT": "json"}
    command = [sys.executable, "-m", "coserve", "serve", "--model", str(tmp_path / "none"), "--port", "0"]
    command += ["--data-dir", str(tmp_path / "data"), "--inference-batch-size", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environ)
    assert done.stderr.count("COSERVE_LOG_FORMATT is no setting; did you mean 'COSERVE_LOG_FORMAT'?") == 1
    assert done.stderr.count("inference_batch_size has no effect with policy 'auto'") == 1
