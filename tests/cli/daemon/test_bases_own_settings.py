"""`coserve serve` on a base without a chat template, and with sampling defaults of its own."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess, Died

BUNDLED = Path(str(files("coserve"))) / "assets" / "tiny"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The bundled base without its chat template, greedy by default."""
    folder = tmp_path / "base"
    shutil.copytree(BUNDLED, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": [0, 1]}))
    return folder


@pytest.mark.slow
def test_a_chat_template_and_sampling_defaults_reach_requests(base: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    chat = {"messages": [{"role": "user", "content": "The with statement"}], "max_tokens": 8}
    with DaemonProcess(base, tmp_path / "data", options=["--chat-template", str(template)]) as daemon:
        daemon.wait_ready()
        _, plain = daemon.call("POST", "/generate", {"prompt": "The with statement", "max_tokens": 8, "temperature": 0})
        _, answer = daemon.call("POST", "/v1/chat/completions", chat)
        assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    template.write_text("{% if %}")
    with DaemonProcess(base, tmp_path / "other", options=["--chat-template", str(template)]) as daemon:
        with pytest.raises(Died, match=r"chat_template: .*chat\.jinja"):
            daemon.wait_ready()
        assert daemon.wait() == 2
