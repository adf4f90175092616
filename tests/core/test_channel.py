"""Two ends over a socket: a peer that does not read holds nobody up, and loses nothing."""

from __future__ import annotations

import asyncio
import socket

from coserve.core.link.channel import api_end, engine_end
from coserve.core.link.generation import Tokens

UNREAD = 8 << 20
"""Bytes: more than two sockets and a reader's buffer hold."""


async def test_a_peer_that_does_not_read_for_a_while() -> None:
    ours, theirs = socket.socketpair()
    api, engine = await api_end(ours), await engine_end(theirs)
    sent = 0
    while engine.backlog < UNREAD:
        engine.send_all([Tokens(id=f"r{sent}", tokens=(1000,) * 1000), Tokens(id=f"r{sent + 1}", tokens=())])
        sent += 2
        await asyncio.sleep(0)  # the peer's end takes in what its buffer holds
    for number in range(sent):
        message = await api.receive()
        assert isinstance(message, Tokens) and message.id == f"r{number}"
    assert engine.backlog == 0
    await asyncio.gather(api.close(), engine.close())
