"""Work that later steps would have to do, such as the capture of a graph, is done in pieces while no request runs."""

from __future__ import annotations

import asyncio
import random

from coserve.core.link.generation import Tokens
from tests.support.fake_ports import FREE, FakeGenerator, Meter
from tests.support.local_engine import running_engine
from tests.support.records import make_request


class Preparing(FakeGenerator):
    """Has some work to do ahead."""

    pieces = 0
    prepared: list[int]
    """How many requests ran at each piece."""
    ready: asyncio.Event

    def prepare(self) -> bool:
        if self.pieces:
            self.pieces -= 1
            self.prepared.append(self.running)
            return True
        if self.prepared:
            self.ready.set()
        return False


def preparing(pieces: int) -> Preparing:
    generator = Preparing(Meter(), FREE, 64, random.Random(0), 0.0)
    generator.prepared, generator.ready, generator.pieces = [], asyncio.Event(), pieces
    return generator


async def test_pieces_are_done_when_no_request_runs() -> None:
    generator = preparing(0)
    async with running_engine(generator) as api:
        api.send(make_request())
        while not isinstance(await api.receive(), Tokens):
            pass
        generator.pieces = 3  # a graph that a new adapter needs
        await asyncio.wait_for(generator.ready.wait(), 240)
    assert generator.prepared == [0, 0, 0]


async def test_an_idle_engine_does_pieces_at_once() -> None:
    generator = preparing(3)
    async with running_engine(generator):
        await asyncio.wait_for(generator.ready.wait(), 240)
    assert generator.prepared == [0, 0, 0]
