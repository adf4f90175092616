"""The command line: its surface is frozen, its options come from the settings, and mistakes end in one line."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve.cli import app
from coserve.cli.app import COMMANDS as KNOWN
from coserve.cli.app import run as command_line
from coserve.config import Config, config_from_json, config_to_json, load_config
from coserve.core.errors import ConfigError
from coserve.state.folder import DataFolder

COMMANDS = [
    *("adapters", "aliases", "backup", "bench", "chat", "config", "demo", "doctor", "eval", "finetune", "generate"),
    *("jobs", "keys", "learn", "log-level", "lora-server", "memory", "plan", "ps", "quotas", "restore", "serve"),
    *("stop", "warm"),
]
SETTINGS = [
    "model",
    "served_model_name",
    "data_dir",
    "host",
    "port",
    "api_key",
    "allowed_hosts",
    "allowed_origins",
    "tls_cert",
    "tls_key",
    "drain_seconds",
    "device",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "mla_cache",
    "tp",
    "ep",
    "lora_server",
    "lora_server_ep",
    "lora_server_at",
    "lora_server_timeout",
    "lora_sharding",
    "threads",
    "engine_timeout",
    "lora_backend",
    "compile",
    "cache_dir",
    "trust_remote_code",
    "chat_template",
    "generation_config",
    "load_format",
    "policy",
    "inference_batch_size",
    "inference_delay",
    "ts_n",
    "ts_unit",
    "slo_ttft",
    "slo_tpot",
    "slo_batch_ttft",
    "slo_batch_tpot",
    "slo_attainment",
    "shed",
    "train_weight",
    "train_patience",
    "train_floor",
    "overlap_steps",
    "training_sm_share",
    "kv_tokens",
    "memory_fraction",
    "page_tokens",
    "max_running",
    "step_tokens",
    "prefix_cache",
    "max_queue",
    "fairness",
    "max_jobs",
    "max_active_jobs",
    "max_sessions",
    "session_timeout",
    "host_adapter_bytes",
    "pinned_memory_bytes",
    "micro_batch_tokens",
    "micro_batch_rows",
    "mix_jobs",
    "recompute",
    "keep_checkpoints",
    "tracker",
    "tracking_dir",
    "data_root",
    "tool_parser",
    "tokenizer_workers",
    "max_connections",
    "max_body_bytes",
    "read_timeout",
    "log_level",
    "log_format",
    "access_log",
    "config",
]


def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "coserve", *args],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PATH": "", **environ},
    )


def test_the_commands_are_these() -> None:
    assert sorted(KNOWN) == COMMANDS


def test_a_new_setting_is_a_decision() -> None:
    assert [f.name for f in dataclasses.fields(Config)] == SETTINGS


@pytest.mark.parametrize("command", [*COMMANDS, "jobs list", "adapters import"])
def test_help_says_something_of_every_command(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_is_plain_text_with_whole_sentences() -> None:
    """`[bitsandbytes]` is not taken for markup, and no line of the list of commands ends in dots."""
    text = CliRunner().invoke(app, ["finetune", "--help"], env={"COLUMNS": "80"}).output
    assert "need coserve[bitsandbytes]" in " ".join(text.split()) and "│" not in text
    for command in ([], ["jobs"], ["adapters"]):
        listed = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).output
        assert "..." not in listed.partition("Commands:")[2]


def test_serve_has_an_option_for_every_setting() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    for name in SETTINGS:
        assert f"--{name.replace('_', '-')}" in result.output


def test_order_of_command_line_environment_file_and_default(tmp_path: Path) -> None:
    file = tmp_path / "coserve.toml"
    file.write_text('port = 1\nmax-queue = 2\nts_n = 3\nallowed_hosts = ["a", "b"]\nrecompute = true\n')
    environ = {"COSERVE_PORT": "4", "COSERVE_MAX_QUEUE": "5", "COSERVE_CONFIG": str(file)}
    config = load_config({"port": 6}, environ)
    assert (config.port, config.max_queue, config.ts_n, config.max_jobs) == (6, 5, 3, 256)
    assert config.allowed_hosts == ("a", "b")
    assert config.recompute


def test_serve_takes_the_model_by_position_or_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["/no/such/folder"], ["--model", "/no/such/folder"]):
        assert command_line(["serve", *given]) == 2
        assert capsys.readouterr().err == "coserve: model: no such folder: /no/such/folder\n"
    assert command_line(["serve", "one", "--model", "other"]) == 2
    assert "expected one model, got 'one' and 'other'" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["-tp", "0"], ["-tp=0"], ["--tp", "0"]])
def test_serve_takes_the_short_option_of_vllm(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["serve", "m", *option]) == 2
    assert capsys.readouterr().err.startswith("coserve: tp: expected at least 1, got 0")


def test_a_kubernetes_service_called_coserve_does_not_set_the_port() -> None:
    assert load_config({}, {"COSERVE_PORT": "tcp://10.0.0.1:80"}).port == 8000


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({}, {"COSERVE_PORT": "many"}, "port: expected an integer, got 'many'"),
        ({}, {"COSERVE_RECOMPUTE": "maybe"}, "recompute: expected true or false"),
        ({"policy": "luck"}, {}, "policy: expected one of auto, slack, ets, ts"),
        ({"load_format": "gguf"}, {}, "^load_format: expected one of auto, dummy, got 'gguf'; auto reads .*GGUF file"),
        ({"load_format": "safetensors"}, {}, "got 'safetensors'; auto reads safetensors"),
        ({"quantization": "awq"}, {}, "got 'awq'; a quantised base is recognised by its files"),
        ({"quantization": "bitsandbytes"}, {}, "got 'bitsandbytes'; did you mean 'nf4'"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "got 'fp8_e4m3'; did you mean 'fp8'"),
        ({"dtype": "half"}, {}, "got 'half'; did you mean 'float16'"),
        ({"generation_config": "vllm"}, {}, "got 'vllm'; did you mean 'none'"),
        ({"port": 70000}, {}, "port: expected 0 to 65535"),
        ({"max_queue": 0}, {}, "max_queue: expected at least 1"),
        ({"micro_batch_tokens": 1}, {}, "micro_batch_tokens: expected at least 2"),
        ({"read_timeout": 1e308}, {}, r"^read_timeout: expected 0.1 to 86400, got 1e\+308$"),
        ({"host": "0.0.0.0"}, {}, "not loopback; set api_key"),
        ({"config": "/nonexistent.toml"}, {}, "^config: cannot read /nonexistent.toml: No such file or directory$"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, object], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(given, environ)


@pytest.mark.parametrize(
    ("key", "hint"), [("prot", "; did you mean 'port'?"), ("tensor_parallel_size", "; did you mean 'tp'?"), ("zzz", "")]
)
def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path, key: str, hint: str) -> None:
    file = tmp_path / "coserve.toml"
    file.write_text(f"{key} = 1\n")
    with pytest.raises(ConfigError, match=re.escape(f"unknown setting {key!r} in {file}{hint}") + "$"):
        load_config({"config": file}, {})


def test_a_settings_file_that_names_another_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "b.toml"
    file.write_text('config = "a.toml"')
    with pytest.raises(ConfigError, match=r"b\.toml names another file, which is not read"):
        load_config({"config": file}, {})


def test_a_setting_twice_in_the_file_is_refused_with_both_spellings(tmp_path: Path) -> None:
    file = tmp_path / "coserve.toml"
    file.write_text("train-floor = 0.1\ntrain_floor = 0.2\n")
    told = f"config: expected each setting once, got 'train-floor' and 'train_floor' in {file}"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        load_config({"config": file}, {})


def test_settings_reach_the_engine_process_without_the_key(tmp_path: Path) -> None:
    config = Config(api_key="secret-of-sixteen", host="0.0.0.0", data_dir=tmp_path, allowed_hosts=("x",), kv_tokens=7)
    sent = config_to_json(config)
    assert b"secret" not in sent
    assert config_from_json(sent) == dataclasses.replace(config, api_key=None, host="127.0.0.1")


def test_a_taken_port_ends_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("serve", "--port", port, "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2
    assert done.stderr == f"coserve: port {port} on 127.0.0.1 is taken by another program\n"


def test_the_data_folder_of_a_running_daemon_ends_in_one_line(tmp_path: Path) -> None:
    with DataFolder(tmp_path).lock():
        done = run("serve", "--port", "0", "--data-dir", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("coserve: ") and "daemon" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "says"), [("./typo", "no such folder"), pytest.param("EMPTY", "no config.json", marks=pytest.mark.slow)]
)
def test_a_model_that_is_none_ends_in_one_line(model: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    model = model.replace("EMPTY", str(tmp_path / "empty"))
    done = run("serve", "--model", model, "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2
    assert done.stderr.startswith("coserve: model: ") and says in done.stderr
    assert done.stderr.count("\n") == 1
