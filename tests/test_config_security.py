"""Settings that keep others out: an empty, blank or missing value closes the daemon or ends its start, never opens
it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve.cli import app
from coserve.config import Config, config_from_json, config_to_json, load_config
from coserve.core.errors import ConfigError
from coserve.core.processes import PARENT, child_environment

KEY = "0123456789abcdef"
BLANK = ("", " ", " " * 20, "\t\n")
CLOSED = Config()
"""What stands if a setting is missing: no local paths, no remote code, loopback only."""

REFUSED: dict[str, tuple[str, ...]] = {
    "api_key": (
        *BLANK,
        "short",
        "x" * 15,
        " " * 16,
        "x" * 15 + " ",
        "key with a blank in it",
        "ключ" * 8,
        "x" * 16 + "\n",
    ),
    "host": (*BLANK, "two hosts"),
    "allowed_hosts": (",", "a,", "a, ,b", "two hosts"),
    "allowed_origins": (",", "app.example", "https://a.example/", "ftp://a.example"),
    "data_dir": BLANK,
    "data_root": BLANK,
    "config": BLANK,
    "trust_remote_code": (*BLANK, "maybe"),
    "max_body_bytes": (*BLANK, "0", "-1", "1e6", "inf"),
    "max_connections": (*BLANK, "0", "-1", "1e6"),
    "read_timeout": (*BLANK, "0", "-1", "nan", "inf", "5e-324", "0.09", "86401", "2147484", "1e10", "1e308"),
    "port": (*BLANK, "-1", "70000"),
}
CASES = [(name, value) for name, values in REFUSED.items() for value in values]
FEW = [(name, value) for name, (first, *_, last) in REFUSED.items() for value in (first, last)]


def test_what_is_missing_is_closed() -> None:
    assert load_config({}, {}) == CLOSED
    assert (CLOSED.host, CLOSED.api_key, CLOSED.allowed_hosts, CLOSED.data_root) == ("127.0.0.1", None, (), None)
    assert not CLOSED.trust_remote_code
    assert CLOSED.read_timeout > 0
    assert CLOSED.max_connections > 0


def test_an_adapter_of_a_large_base_may_be_uploaded() -> None:
    """Rank 16 at all sites of Llama-3.1-70B in float32, as PEFT saves it."""
    query, key, inner = 2 * 8192, 8192 + 1024, 8192 + 28672
    assert 80 * (2 * query + 2 * key + 3 * inner) * 16 * 4 < CLOSED.max_body_bytes <= 1 << 30


@pytest.mark.parametrize(("name", "value"), CASES)
def test_the_environment(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        load_config({}, {f"COSERVE_{name.upper()}": value})


@pytest.mark.parametrize(("name", "value"), [case for case in FEW if case[0] != "config"])
def test_the_file(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "coserve.toml"
    quoted = value.replace("\n", "\\n").replace("\t", "\\t")
    file.write_text(f'{name} = "{quoted}"\n')
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        load_config({"config": file}, {})


@pytest.mark.parametrize(("name", "value"), [case for case in FEW if case[0] != "trust_remote_code"])
def test_the_command_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COSERVE_API_KEY", raising=False)

    async def never(config: Config, **_: object) -> None:
        raise AssertionError("it started")

    monkeypatch.setattr("coserve.cli.daemon.serve.serve", never)
    found = CliRunner().invoke(app, ["serve", f"--{name.replace('_', '-')}", value])
    assert found.exit_code != 0
    assert isinstance(found.exception, ConfigError | SystemExit)


@pytest.mark.parametrize(
    "line",
    [
        *("api_key = false", "api_key = []", "api_key = {}", "allowed_hosts = [5]", 'allowed_hosts = [""]'),
        *('allowed_hosts = ["a", " "]', "data_root = false", 'trust_remote_code = ["true"]', "host = true"),
        *("max_connections = true", "max_connections = []", "max_connections = 1.5", "read_timeout = true"),
    ],
)
def test_values_of_another_type_in_the_file(line: str, tmp_path: Path) -> None:
    file = tmp_path / "coserve.toml"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=f"^{line.split()[0]}: expected"):
        load_config({"config": file}, {})


def test_a_secret_is_not_repeated_by_what_refuses_it() -> None:
    with pytest.raises(ConfigError, match="at least 16 characters, got 9") as refused:
        Config(api_key="tell-none")
    assert "tell-none" not in str(refused.value)


def test_a_key_of_sixteen_characters_opens_other_addresses(tmp_path: Path) -> None:
    file = tmp_path / "coserve.toml"
    file.write_text(f'api_key = "{KEY}"\n')
    for given, environ in (({"api_key": KEY}, {}), ({}, {"COSERVE_API_KEY": KEY}), ({"config": file}, {})):
        assert load_config({"host": "0.0.0.0", **given}, environ).api_key == KEY
    for environ in ({}, {"COSERVE_API_KEY": ""}, {"COSERVE_API_KEY": " " * 16}):
        with pytest.raises(ConfigError):
            load_config({"host": "0.0.0.0"}, environ)


def test_a_host_has_no_port() -> None:
    """It would match no `Host` and no `Origin`: their ports do not count."""
    for hosts in (("page.example:3000",), ("localhost", "127.0.0.1:8000"), ("[::1]",)):
        with pytest.raises(ConfigError, match=r"^allowed_hosts: expected a host name or address"):
            Config(allowed_hosts=hosts)
    assert Config(allowed_hosts=("fd00::1", "page.example")).allowed_hosts == ("fd00::1", "page.example")


def test_an_origin_has_a_scheme_and_no_path() -> None:
    for origin in (
        "page.example",
        "https://",
        "https://a.example/",
        "https://me@page.example",
        "https://a:b",
        "null",
    ):
        with pytest.raises(ConfigError, match=r"^allowed_origins: expected \* or a scheme, a name"):
            Config(allowed_origins=(origin,))
    with pytest.raises(ConfigError, match=r"^allowed_origins: '\*' lets every web page use the daemon; set api_key"):
        Config(allowed_origins=("*",))
    config = Config(allowed_origins=("https://page.example", "http://localhost:3000", "*"), api_key="x" * 16)
    assert config_from_json(config_to_json(config)).api_key is None, "the engine serves no page"


def test_no_host_is_allowed_by_an_empty_name() -> None:
    for hosts in (("",), (" ",), ("a", "")):
        with pytest.raises(ConfigError, match=r"^allowed_hosts: expected"):
            Config(allowed_hosts=hosts)
    assert load_config({}, {"COSERVE_ALLOWED_HOSTS": ""}).allowed_hosts == ()


def test_child_processes_do_not_inherit_the_key() -> None:
    assert child_environment({"COSERVE_API_KEY": KEY, "PATH": "/bin"}) == {"PATH": "/bin", PARENT: str(os.getpid())}
