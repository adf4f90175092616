"""`coserve serve` on a checkpoint whose tokenizer is Python code, as Kimi K2's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess, Died
from tests.support.kimi import write_checkpoint


@pytest.mark.slow
def test_kimi_k2_is_served_with_the_flag_and_refused_without_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "kimi").mkdir()
    model, environ = write_checkpoint(tmp_path / "kimi"), {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    with DaemonProcess(model, tmp_path / "refused", environ=environ) as daemon:
        with pytest.raises(Died, match="pass --trust-remote-code"):
            daemon.wait_ready()
        assert daemon.wait() == 2
    assert not list((tmp_path / "modules").rglob("*kimi*")), "transformers copies code there to run it"
    with DaemonProcess(model, tmp_path / "data", environ=environ, options=["--trust-remote-code"]) as daemon:
        daemon.wait_ready()
        body = {"messages": [{"role": "user", "content": "hello 漢字"}], "max_tokens": 3, "temperature": 0}
        status, answer = daemon.call("POST", "/v1/chat/completions", body | {"model": "kimi"})
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] == 5
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        status, answer = daemon.call(
            "POST", "/v1/chat/completions", body | {"model": "kimi", "response_format": schema}
        )
        assert status == 200 and answer["choices"][0]["message"]["content"].strip("-0123456789 ") == "", answer
        _, health = daemon.call("GET", "/health")
        assert health["base"]["family"] == "deepseek_v3"
