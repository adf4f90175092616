"""A real daemon's life: what it logs, how it stops, and that its engine may die or hang while it starts or works."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash_oracle import PROMPT, job_request
from tests.support.daemon_process import DaemonProcess, Died, Json
from tests.support.examples import in_turns

JSON_LOG = ("--log-format", "json", "--access-log")
STREAMS: dict[str, tuple[str, Json]] = {
    "native": ("/generate", {"prompt": "The", "stream": True}),
    "openai": ("/v1/completions", {"prompt": "The", "stream": True}),
    "openai chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
    "tgi": ("/generate_stream", {"inputs": "The"}),
}
LONG = {"max_tokens": 100, "ignore_eos": True}
TGI_LONG = {"parameters": {"max_new_tokens": 100, "ignore_eos_token": True}}


class Stream:
    """A stream of events that has begun."""

    def __init__(self, port: int, path: str, body: Json | None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        if body is None:
            self._connection.request("GET", path)
        else:
            self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        assert self._response.getheader("Transfer-Encoding") == "chunked"
        self._begun = self._response.readline()

    def rest(self) -> list[Any]:
        """The events to the end of the transfer, which must be well-formed: http.client raises otherwise."""
        text = (self._begun + self._response.read()).decode()
        self._connection.close()
        data = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
        return ["[DONE]" if each == "[DONE]" else json.loads(each) for each in data]


def wait_for(daemon: DaemonProcess) -> int:
    """Its port, once it listens."""
    port = int(daemon.logged("daemon starts")["port"])
    daemon.at_port(port)
    return port


@pytest.mark.slow
def test_connections_that_come_at_once_find_room(model: Path, tmp_path: Path) -> None:
    """However busy the daemon is: the system makes them, or a client would try again after a second."""
    count = 600
    if int(Path("/proc/sys/net/core/somaxconn").read_text()) < count:
        pytest.skip("the system keeps fewer")
    starts = "engine.start=delay:200s"
    with DaemonProcess(model, tmp_path / "data", options=JSON_LOG, failpoints=starts) as daemon, ExitStack() as stack:
        port = wait_for(daemon)
        assert daemon.call("GET", "/health")[0] == 503
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            poll, pending = select.poll(), set[int]()
            for _ in range(count):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
                poll.register(client, select.POLLOUT)
                pending.add(client.fileno())
            deadline = time.monotonic() + 60
            while pending and time.monotonic() < deadline:
                for connected, _ in poll.poll(100):
                    pending.remove(connected)
                    poll.unregister(connected)
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        assert not pending, f"{len(pending)} of {count} found no room"


def messages(entries: list[Json]) -> Iterator[str]:
    return (entry["message"] for entry in entries)


@pytest.mark.parametrize("ranks", in_turns({"one rank": "1", "two ranks": "2"}, days=2))
def test_ctrl_c_ends_streams_properly_and_the_log_tells_the_whole_story(
    model: Path, tmp_path: Path, ranks: str
) -> None:
    with DaemonProcess(
        model,
        tmp_path / "data",
        failpoints="generate.mid_stream=delay:0.3s",
        options=(*JSON_LOG, "--tp", ranks, "--policy", "auto"),
    ) as daemon:
        daemon.wait_ready()
        port = wait_for(daemon)
        _, job = daemon.call("POST", "/finetune", job_request("pirate"))
        assert list(daemon.events("GET", f"/finetune/{job['id']}/events"))[-1]["state"] == "succeeded"
        # Service managers send it to all processes: the engine leaves the stop to its parent.
        os.kill(int(daemon.logged("engine ready")["engine_pid"]), signal.SIGTERM)
        endless = job_request("endless")
        endless["training"]["steps"] = 5000
        _, other = daemon.call("POST", "/finetune", endless)
        daemon.logged("job started")
        assert daemon.call("POST", f"/finetune/{other['id']}/pause")[0] == 200
        assert daemon.call("POST", f"/finetune/{other['id']}/cancel")[0] == 200
        assert daemon.call("DELETE", "/adapters/pirate")[0] == 200

        _, paused = daemon.call("POST", "/finetune", endless | {"adapter": "paused"})
        assert daemon.call("POST", f"/finetune/{paused['id']}/pause")[0] == 200

        opened = {"job": Stream(port, f"/finetune/{paused['id']}/events", None)}
        for name, (path, body) in STREAMS.items():
            opened[name] = Stream(port, path, body | (TGI_LONG if name == "tgi" else LONG))
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(daemon.call, "POST", "/generate", {"prompt": "The", **LONG})
            opened["last"] = Stream(port, "/generate", STREAMS["native"][1] | LONG)  # by then the whole one is there
            daemon.interrupt()
            ends = {name: stream.rest() for name, stream in opened.items()}
            status, refusal = whole.result()
        assert (status, refusal["error"]["code"]) == (503, "engine_unavailable")
        assert daemon.wait() == 0

    for name, events in ends.items():
        if events[-1] == "[DONE]":
            events.pop()
        assert "error" in events[-1], (name, events[-1])
        assert "stopping" in json.dumps(events[-1]), (name, events[-1])

    entries = daemon.entries()  # every line is an object
    followers = {f"rank-{rank}" for rank in range(1, int(ranks))}
    assert {entry["process"] for entry in entries} == {"api", "engine"} | followers
    assert all({"ts", "level", "logger", "message"} <= entry.keys() for entry in entries)
    told = [
        *("daemon starts", "engine starts", "base loaded", "engine ready", "daemon ready", "job accepted"),
        *("job started", "job succeeded", "adapter published", "job paused", "job cancelled", "adapter deleted"),
        *("stopping, at most 65 s; a second signal stops at once", "engine stops", "daemon stopped"),
    ]
    seen = list(messages(entries))
    assert [message for message in told if message not in seen] == []
    assert not [message for message in seen if "started again" in message]
    by_message = {entry["message"]: entry for entry in reversed(entries)}
    assert by_message["engine ready"].keys() >= {"model", "device", "dtype", "kv_tokens", "seconds"}
    assert by_message["job accepted"]["job"] == job["id"]
    assert by_message["adapter published"]["adapter"] == "pirate"
    answered = [entry for entry in entries if entry["logger"] == "coserve.access"]
    assert any(entry["path"] == "/generate" and entry["status"] == 200 for entry in answered)


@pytest.mark.slow
def test_an_engine_killed_while_it_starts_is_started_again_and_a_second_ctrl_c_stops_at_once(
    model: Path, tmp_path: Path
) -> None:
    points = "engine.start=delay:2s;shutdown=delay:200s"
    with DaemonProcess(model, tmp_path / "data", failpoints=points, options=JSON_LOG) as daemon:
        wait_for(daemon)
        os.kill(int(daemon.logged("engine starts")["engine_pid"]), signal.SIGKILL)
        daemon.logged(
            "the engine was killed by SIGKILL while it started; "
            "it is started again in 0.5 s (early death 1 in a row, number 5 ends the daemon)"
        )
        status, health = daemon.call("GET", "/health")
        assert (status, health["status"], health["engine_restarts"]) == (503, "starting", 1)
        assert "while it started" in health["notes"][0]
        assert daemon.call("GET", "/health/ready")[0] == 503
        status, refusal = daemon.call("POST", "/generate", PROMPT)
        assert (status, refusal["error"]["code"]) == (503, "engine_unavailable")

        daemon.wait_ready()
        assert daemon.next_line() == "ready"  # a CPU engine has no warm-up
        assert daemon.call("GET", "/health/ready")[0] == 200
        assert daemon.call("POST", "/generate", PROMPT)[0] == 200
        _, health = daemon.call("GET", "/health")
        assert (health["status"], health["engine_restarts"], health["notes"]) == ("ready", 1, [])

        daemon.interrupt()
        daemon.logged("stopping, at most 65 s; a second signal stops at once")
        daemon.interrupt()
        assert daemon.wait() == 128 + signal.SIGINT
    assert "stopped at once: what was not saved goes on from the last checkpoints" in messages(daemon.entries())


STOPS = {
    "ctrl-c while the engine starts": ("engine", signal.SIGINT),
    "ctrl-c while the tokenizer is fetched": ("daemon", signal.SIGINT),
    "terminated while the tokenizer is fetched": ("daemon", signal.SIGTERM),
}


@pytest.mark.parametrize("stop", in_turns(STOPS.keys(), fast=("ctrl-c while the engine starts",)))
def test_a_stop_at_the_start(model: Path, tmp_path: Path, stop: str) -> None:
    starts, number = STOPS[stop]
    point = f"{starts}.start=delay:200s"
    with DaemonProcess(model, tmp_path / "data", failpoints=point, options=JSON_LOG) as daemon:
        daemon.logged(f"{starts} starts")
        os.killpg(daemon.process.pid, number)
        with pytest.raises(Died):
            daemon.wait_ready()
        assert daemon.wait() == 0
    assert "daemon stopped" in messages(daemon.entries())


def engine_pid(daemon: DaemonProcess) -> int:
    """Of the last engine."""
    daemon.logged("engine starts")
    return int([one for one in daemon.entries() if one["message"] == "engine starts"][-1]["engine_pid"])


def check_restarted(daemon: DaemonProcess, why: str, restarts: int) -> None:
    status, answer = daemon.call("POST", "/generate", {"prompt": "Today we", "max_tokens": 4})
    while status == 503:
        status, answer = daemon.call("POST", "/generate", {"prompt": "Today we", "max_tokens": 4})
    assert status == 200, answer
    assert daemon.call("GET", "/health")[1]["engine_restarts"] == restarts
    assert any(why in entry["message"] for entry in daemon.entries())


@pytest.mark.parametrize("when", in_turns(["starts", "works", "makes no progress"]))
def test_one_that_hangs_is_started_again(model: Path, tmp_path: Path, when: str) -> None:
    """Its process is stopped; or it runs, as with a device that never ends a step."""
    options = ("--log-format", "json", "--engine-timeout", "12")
    hangs = "generate.mid_stream=delay:600s@9"  # the ninth step of an engine: no check generates so much
    with DaemonProcess(model, tmp_path / "data", options=options, failpoints=hangs) as daemon:
        if when == "starts":
            os.kill(engine_pid(daemon), signal.SIGSTOP)
        daemon.wait_ready()
        daemon.logged("engine ready")
        if when == "starts":
            check_restarted(daemon, "while it started: its process did not run for 6 s", 1)
        elif when == "works":
            status, job = daemon.call("POST", "/finetune", job_request("adapter"))
            assert status == 202, job
            events = daemon.events("GET", f"/finetune/{job['id']}/events")
            next(one for one in events if one["type"] == "metrics")
            os.kill(engine_pid(daemon), signal.SIGSTOP)
            status, answer = daemon.call("POST", "/generate", {"prompt": "Today we"})
            assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
            assert list(events)[-1]["state"] == "succeeded"
            check_restarted(daemon, "of service: its process did not run for 6 s", 1)
        else:
            body = {"prompt": "Today we", "max_tokens": 200, "ignore_eos": True, "stream": True}
            *_, last = daemon.events("POST", "/generate", body)
            assert last["error"]["code"] == "engine_unavailable"
            check_restarted(daemon, "it said nothing for 12 s, though it had work", 1)
