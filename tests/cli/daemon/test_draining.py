"""A daemon that gets SIGTERM lets requests in flight finish, and refuses others; and a daemon that speaks HTTPS."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from coserve.cli.app import run
from coserve.core.link.generation import Generate
from tests.support.api_server import REPLY, Api, read_events, serve_api
from tests.support.daemon_process import DaemonProcess

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


async def drained(api: Api, seconds: float) -> tuple[str, dict[str, object]]:
    """Drain while a stream is in flight: what the stream says, and how another request is refused meanwhile."""
    api.engine.go_requests.clear()
    body = {"prompt": "x", "stream": True}

    async def read() -> str:
        async with api.http.post("/generate", json=body) as stream:
            return await stream.text()

    async with asyncio.TaskGroup() as tasks:
        text = tasks.create_task(read())
        await api.engine.saw(Generate)
        draining = tasks.create_task(api.service.drain(seconds))
        async with api.http.get("/health/ready") as ready:
            assert ready.status == 503 and "stopping; requests in progress: 1" in (await ready.json())["notes"]
        assert (await api.call("GET", "/health"))[0] == 200
        async with api.http.post("/generate", json=body) as refused:
            assert refused.status == 503 and refused.headers["Retry-After"] == "2"
            error = (await refused.json())["error"]
        if seconds > 1:
            assert not draining.done()
            api.engine.go_requests.set()
        await draining
        if seconds <= 1:
            api.service.stop()
    return text.result(), error


@pytest.mark.parametrize("seconds", [600.0, 0.01])
async def test_requests_in_flight_finish_within_the_bound(tmp_path: Path, seconds: float) -> None:
    async with serve_api(tmp_path / "data") as api:
        text, error = await drained(api, seconds)
        assert error["code"] == "engine_unavailable" and "stopping" in str(error["message"])
        if seconds > 1:
            said = [event["data"] for event in read_events(text) if event["data"] != "[DONE]"]
            assert "".join(chunk["text"] for chunk in said) == REPLY
        else:
            assert json.loads(text)["error"] == error  # it had not begun


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", str(key), "-out", str(cert))
    subprocess.run(["openssl", *new, *names], check=True, capture_output=True)
    return cert, key


@pytest.mark.slow
def test_sigterm_over_https(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = certificate(tmp_path)
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--log-format", "json")
    slow = "generate.mid_stream=delay:0.3s"
    with DaemonProcess(model, tmp_path / "data", failpoints=slow, options=options) as daemon:
        daemon.wait_ready()
        port = int(daemon.url.rsplit(":", 1)[1])
        command = [sys.executable, "-P", "-m", "coserve", "jobs", "list", "--url", f"https://127.0.0.1:{port}"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("COSERVE_")}
        environ |= {"SSL_CERT_FILE": str(cert)}  # which the client reads as it is imported
        said = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        said = subprocess.run(command, env=environ | {"SSL_CERT_FILE": ""}, capture_output=True, text=True, check=False)
        assert "self-signed certificate" in said.stderr and "SSL_CERT_FILE" in said.stderr, said.stderr
        context = ssl.create_default_context(cafile=str(cert))
        with closing(http.client.HTTPSConnection("127.0.0.1", port, context=context)) as client:
            body = {"prompt": "The", "stream": True, "max_tokens": 10, "ignore_eos": True}
            client.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            response = client.getresponse()
            begun = response.readline()
            os.kill(daemon.process.pid, signal.SIGTERM)
            daemon.logged("stopping, at most 95 s; a second signal stops at once")
            events = read_events((begun + response.read()).decode())
        assert events[-1]["data"] == "[DONE]" and "error" not in json.dumps(events)
        assert daemon.wait() == 0
    assert run(["serve", "--tls-cert", str(cert)]) == 2
    assert "expected both tls_cert and tls_key" in capsys.readouterr().err
