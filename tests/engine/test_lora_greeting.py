"""What an engine and a LoRA server that others use, too, say first: both are of one version of coserve, or part."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch

from coserve.config import Config
from coserve.core.errors import LoraServersDiffer, LoraServersMissing, LoraServersSilent
from coserve.core.link.channel import frame
from coserve.core.link.link import PeerLost
from coserve.core.link.lora_servers import PROTOCOL, Hello, receive_hello, send_hello, socket_path
from coserve.engine.lora_server.messages import AnyFromServer, AnyToServer
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.sessions import Sessions
from coserve.engine.lora_server.shared import connect_to_server
from coserve.engine.lora_server.start import make_servers
from coserve.model.base import wrap_base
from tests.support.families import tiny_family
from tests.support.lora_servers import start_message

OTHER = Hello(version="0.0.9", protocol=7)
MESSAGES = "23cde0af2cb29674"
"""Digest of the messages of `PROTOCOL`."""


def framed(message: object) -> bytes:
    return frame(msgspec.msgpack.Encoder(), message)


def servers_that_say(folder: Path, answer: bytes) -> tuple[LoraServers, bytes]:
    """Servers of an engine that connects to one which answers so, and what the engine has said until then."""
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as other:
        listening.bind(str(socket_path(folder, 0)))
        listening.listen()

        def serve() -> bytes:
            connection, _ = listening.accept()
            with connection:
                said = connection.recv(1 << 16)
                connection.sendall(answer)
                return said + connection.recv(1 << 16) if answer else said

        said = other.submit(serve)
        base = wrap_base(tiny_family("mixtral"), name="mixtral")
        servers = make_servers(base, Config(data_dir=folder, lora_server=1, lora_server_at=folder), 64)
        assert servers is not None
        return servers, said.result()


def test_an_engine_refuses_servers_of_another_version(tmp_path: Path) -> None:
    """It says both versions, and nothing but its greeting."""
    servers, said = servers_that_say(tmp_path, framed(OTHER))
    with closing(servers), pytest.raises(LoraServersDiffer) as found:
        servers.wait()
    assert f"expected {Hello()} (this daemon's), got coserve 0.0.9, protocol 7" in str(found.value)
    assert isinstance(found.value, LoraServersMissing), "an engine that is started again tries it several times"
    assert said == framed(Hello())


@pytest.mark.parametrize("answer", [b"", b"\xff" * 4])
def test_an_engine_refuses_a_server_that_says_no_version(answer: bytes, tmp_path: Path) -> None:
    servers, _ = servers_that_say(tmp_path, answer)
    with closing(servers), pytest.raises(LoraServersDiffer, match=r"expected coserve .*got one that says no version"):
        servers.wait()


def test_a_server_that_says_nothing_is_not_taken_for_one_of_another_version(tmp_path: Path) -> None:
    """It hangs. The engine says so, and ends the connection; a server that is well ends its end."""
    base = wrap_base(tiny_family("mixtral"), name="mixtral")
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as other:
        listening.bind(str(socket_path(tmp_path, 0)))
        listening.listen()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                while connection.recv(1 << 16):
                    """Nothing is answered."""

        ended = other.submit(serve)
        with pytest.raises(LoraServersSilent, match=f"LoRA server at {tmp_path / '0'}: said nothing for 0.5 s"):
            connect_to_server(tmp_path, start_message(base.spec), silence=0.5)
        ended.result(60.0)


@pytest.mark.parametrize("hello", [framed(OTHER), framed(["not a greeting"])])
def test_a_server_reads_nothing_more_of_an_engine_of_another_version(
    hello: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Another engine of that server is none the worse."""
    ours, theirs = socket.socketpair()
    with ours, ThreadPoolExecutor(1) as other:
        session = other.submit(Sessions(torch.device("cpu")).serve, theirs)
        ours.sendall(hello + b"\xff\xff\xff\xff no message of this version")
        if b"0.0.9" in hello:
            assert receive_hello(ours) == (Hello(), [])
        session.result(60.0)
        with pytest.raises((PeerLost, ConnectionResetError)):
            receive_hello(ours)
    assert "expected a message of another process" not in caplog.text


def test_files_come_with_a_greeting() -> None:
    """The bytes behind it are not taken."""
    ours, theirs = socket.socketpair()
    file = os.memfd_create("page")
    os.write(file, b"shared")
    with ours, theirs:
        send_hello(ours, [file])
        ours.sendall(b"next")
        hello, (found,) = receive_hello(theirs)
        assert hello == Hello() and os.pread(found, 9, 0) == b"shared" and theirs.recv(9) == b"next"
    os.close(found)
    os.close(file)


def test_other_messages_are_another_protocol() -> None:
    """If this fails, raise `PROTOCOL`, and put the new digest here."""

    def plain(schema: object) -> object:
        if isinstance(schema, dict):
            return {key: plain(value) for key, value in schema.items() if key != "description"}
        return [plain(one) for one in schema] if isinstance(schema, list) else schema

    found = plain(msgspec.json.schema_components([AnyToServer, AnyFromServer], ref_template="{name}"))
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    assert (PROTOCOL, digest[:16]) == (3, MESSAGES)
