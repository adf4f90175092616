"""docs/guide/fine-tune.md is true: its table has every setting with its default, and its commands run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import msgspec
from transformers import TrainingArguments

from coserve.cli.finetuning.settings import FLAGS
from coserve.core.training.settings import TrainingRequest
from tests.support.daemon_process import DaemonProcess
from tests.support.examples import on_days

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "guide" / "fine-tune.md").read_text()
TRL = {"max_length", "completion_only_loss", "assistant_only_loss"}


def table() -> list[list[str]]:
    """The rows of the table of settings: name, default, option, other libraries' name, meaning."""
    section = PAGE.partition("## Settings\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")][1:]
    return [[cell.strip() for cell in line.split("|")[1:6]] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_table_has_every_setting() -> None:
    assert sorted(name for row in table() for name in names(row[0])) == sorted(TrainingRequest.__struct_fields__)


def test_the_defaults_are_these() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(TrainingRequest)}
    for setting, default, *_ in table():
        for name, shown in zip(names(setting), default.split(", "), strict=False):
            if isinstance(fields[name], bool):
                assert shown == ("on" if fields[name] else "off"), name
            elif isinstance(fields[name], float | int):
                assert float(shown.split()[0]) == fields[name], name
            elif fields[name] == "auto":
                assert shown == "chosen", name


def test_the_options_are_those_of_the_command_line() -> None:
    for setting, _, options, *_ in table():
        shown = re.findall(r"`(--[\w-]+)`", options)
        ours = [FLAGS.get(f"training.{name}", "--set") for name in names(setting)]
        assert shown in (ours, ours[:1]) and set(shown) == set(ours), setting


def test_the_other_names_are_those_of_transformers_and_trl() -> None:
    known = set(TrainingArguments.__dataclass_fields__) | TRL
    assert {name for _, _, _, others, _ in table() for name in names(others)} <= known


@on_days(3)
def test_the_commands_run_as_printed(tmp_path: Path) -> None:
    (tmp_path / "coserve").symlink_to(ROOT / "coserve")
    block = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0].replace("\\\n", " ")
    inline, upload, events, download = [line[2:] for line in block.splitlines()]
    with DaemonProcess(Path("bundled"), tmp_path / "data") as daemon:
        daemon.wait_ready()

        def run(command: str) -> str:
            here = command.replace("localhost:8000", daemon.url.removeprefix("http://"))
            environ = {"PATH": os.environ["PATH"]}
            done = subprocess.run(
                ["bash", "-c", here], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=True
            )
            return done.stdout

        for command in (inline, upload):
            job = json.loads(run(command))
            assert job["state"] == "queued", job
            assert '"state":"succeeded"' in run(events.replace("JOB", job["id"])).split("data: ")[-1]
        assert (job["training"]["schedule"], job["training"]["warmup_steps"]) == ("cosine", 4)
        run(download)
        assert (tmp_path / "sailor-1" / "adapter_config.json").is_file()
