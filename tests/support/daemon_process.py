"""A real daemon in processes of its own, over a real socket, that a failpoint may kill at any moment."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from coserve.state.failpoints import VARIABLE

Json = dict[str, Any]


class Died(Exception):
    """The daemon went away before it had answered."""


@contextmanager
def _deaths() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, http.client.IncompleteRead, http.client.BadStatusLine) as error:
        raise Died(str(error)) from error


class DaemonProcess:
    """`coserve serve` on `model` with its data in `data`; a context that leaves no process behind.

    All its processes are one session, so that `kill-group` ends the daemon and not the tests.
    """

    def __init__(
        self,
        model: Path,
        data: Path,
        *,
        failpoints: str = "",
        data_root: Path | None = None,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        python: Path | str = sys.executable,
        module: Sequence[str] = ("coserve", "serve"),
    ) -> None:
        """`options`: further ones of `coserve serve`; `environ`: further variables; requests have the key that they
        give. `python`: of another environment; `module`: one that runs the command, and its own arguments."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COSERVE_")}
        environment |= {"OMP_NUM_THREADS": "1", VARIABLE: failpoints, "PYTHONUNBUFFERED": "1"} | dict(environ or {})
        command = [str(python), "-P", "-m", *module, "--model", str(model), "--data-dir", str(data)]
        self.data = data
        self.log = data.with_name(f"{data.name}.log")
        self._log = self.log.open("a")
        self._log.write(f"---- failpoints: {failpoints or 'none'}\n")
        self._log.flush()
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--threads", "1", "--data-root", str(data_root or data), *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            text=True,
        )
        self._port = 0
        key = environment.get("COSERVE_API_KEY")
        self._headers = {"Content-Type": "application/json"} | (
            {} if key is None else {"Authorization": f"Bearer {key}"}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._log.close()

    def wait_ready(self) -> None:
        """Until it serves. Raises `Died`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "listens on" in line:
                self._port = int(line.rsplit(":", 1)[1])
                return
        raise Died(f"while it started; its log ends with\n{self.log.read_text()[-2000:]}")

    def next_line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def end(self) -> int:
        """Kill what is left of it, wait until its last process let go of the pipe; the status of the first."""
        assert self.process.stdout is not None
        if not self.process.stdout.closed:  # then something of the group still lives, or was not waited for
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Until the last of its processes is gone by itself; the status of the first."""
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            self.process.stdout.read()
            self.process.stdout.close()
        return self.process.wait()

    def logged(self, message: str) -> Json:
        """The first line of that message in the log (`--log-format json`), as soon as it is there."""
        for _ in range(3000):
            for entry in self.entries():
                if entry["message"] == message:
                    return entry
            time.sleep(0.05)
        raise AssertionError(f"never logged: {message}")

    def entries(self) -> list[Json]:
        """The log's lines that are whole; the first is the tests' own."""
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()[1:]]

    def interrupt(self) -> None:
        """Ctrl-C at a terminal: every process of the daemon gets it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def at_port(self, port: int) -> None:
        """Requests go there, though it is not ready."""
        self._port = port

    def stop(self) -> int:
        """SIGTERM, and the status that it ends with."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    # ---- requests

    def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of one request. Raises `Died`."""
        with _deaths(), self._request(method, path, body, headers) as response:
            return response.status, json.loads(response.read())

    def events(self, method: str, path: str, body: object = None) -> Iterator[Json]:
        """The JSON of each server-sent event until the stream ends. Raises `Died`."""
        ended = False
        with _deaths(), self._request(method, path, body, None) as response:
            assert response.status == 200, (response.status, response.read())
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    ended = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    ended = ended or event.get("state") in ("succeeded", "failed", "cancelled") or "error" in event
                    yield event
        if not ended:
            raise Died("in the middle of a stream")

    @contextmanager
    def _request(
        self, method: str, path: str, body: object, headers: dict[str, str] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=400)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, self._headers | (headers or {}))
            yield connection.getresponse()
        finally:
            connection.close()
