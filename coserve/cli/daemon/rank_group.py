"""The processes of one engine under tensor parallelism: started, watched and ended together.

A rank that ends, reports a fault or falls silent ends all others, since they cannot continue without it. Its death is
reported as the engine's (`loss`), and the supervisor starts all of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Never

import msgspec

from coserve.cli.daemon.rank_watch import WatchedRank, find_loss
from coserve.config import Config, config_to_json
from coserve.core import ranks
from coserve.core.cancellation import cancel_all
from coserve.core.errors import CoserveError, error_from_code
from coserve.core.health import RankInfo
from coserve.core.link.channel import AsyncChannel
from coserve.core.link.link import PeerLost
from coserve.core.logs import log_event
from coserve.core.processes import how_ended, is_stopped, signal_child, start_child
from coserve.state.folder import DataFolder

log = logging.getLogger(__name__)

CONSEQUENCE = 0.5
"""Seconds. A fault may only be the consequence of another rank's death, which makes collectives fail on all ranks. A
death within this time is reported instead of the fault."""


@dataclass(eq=False)
class _Rank:
    number: int
    process: asyncio.subprocess.Process
    reports: AsyncChannel[Never, ranks.RankReport]
    watched: WatchedRank
    lost: bool = False
    exiting: asyncio.Task[None] | None = None
    """Task that ends with the process."""

    def end(self) -> None:
        signal_child(self.process, signal.SIGKILL)


class RankGroup:
    """All ranks of an engine. Rank 0's process also has the link to the API process."""

    def __init__(self) -> None:
        self.loss: str | None = None
        """The rank that was lost, and how; None: all live."""
        self.refusal: CoserveError | None = None
        """Why a rank cannot start with these settings."""
        self.lost = asyncio.Event()
        self._ranks: list[_Rank] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._rendezvous: Path | None = None

    async def start(self, config: Config, link: socket.socket) -> None:
        """Start all processes. `link`: rank 0's end of the link to the API process. After an error, call `kill`."""
        staging = DataFolder(config.data_dir).staging  # emptied at the daemon's start
        self._rendezvous = staging / f"ranks-{secrets.token_hex(8)}"
        pairs = [socket.socketpair() for _ in range(config.tp - 1)]
        board = _shared_memory(ranks.board_bytes(config.tp))
        try:
            for number in range(config.tp):
                leads = number == 0
                commands = [ours for ours, _ in pairs] if leads else [pairs[number - 1][1]]
                ours, theirs = socket.socketpair()
                with theirs:
                    place = ranks.RankPlace(
                        rank=number,
                        size=config.tp,
                        rendezvous=self._rendezvous.absolute().as_uri(),
                        board=board.fileno(),
                        monitor=theirs.fileno(),
                        commands=tuple(sock.fileno() for sock in commands),
                    )
                    reports = await AsyncChannel[Never, ranks.RankReport].open(
                        ours, msgspec.msgpack.Decoder(ranks.RankReport)
                    )
                    others: list[socket.socket | IO[bytes]] = [*([theirs] if leads else []), *commands, board]
                    process = await start_child(
                        "coserve.engine.process" if leads else "coserve.engine.ranks.process",
                        link if leads else theirs,
                        msgspec.json.encode(place).decode(),
                        stdin=config_to_json(config),
                        others=others,
                    )
                self._began(_Rank(number, process, reports, WatchedRank(number)), config.tp)
        finally:
            board.close()
            for sock in (sock for pair in pairs for sock in pair):
                sock.close()
        self._tasks.append(asyncio.create_task(self._watch()))

    def _began(self, rank: _Rank, size: int) -> None:
        self._ranks.append(rank)
        listening = asyncio.create_task(self._listen(rank))
        rank.exiting = asyncio.create_task(self._await_exit(rank, listening))
        self._tasks += [listening, rank.exiting]
        log_event(log, "rank starts", rank=rank.number, ranks=size, engine_pid=rank.process.pid)

    @property
    def leader(self) -> asyncio.subprocess.Process:
        """The process of rank 0."""
        return self._ranks[0].process

    def states(self) -> tuple[RankInfo, ...]:
        """Return the state of each rank for `/health`."""
        done = self._ranks[0].watched.done if self._ranks else 0
        return tuple(
            RankInfo(
                rank=rank.number,
                state="lost" if rank.lost else "ready" if rank.watched.ready else "starting",
                silent=rank.watched.silent,
                behind=max(0, done - rank.watched.done),
            )
            for rank in self._ranks
        )

    async def wait(self) -> int:
        """Wait until all ranks have ended, and return the exit status of rank 0."""
        statuses = await asyncio.gather(*(rank.process.wait() for rank in self._ranks))
        return statuses[0]

    def stop(self) -> None:
        """Allow ranks to end from now on: rank 0 was, or will be, asked to."""
        self._stopping = True

    async def kill(self) -> None:
        """Kill the processes that still run, and wait for them."""
        self._stopping = True
        ended = [
            rank.exiting for rank in self._ranks if rank.exiting is not None and rank.process.returncode is not None
        ]
        await asyncio.gather(*ended, return_exceptions=True)  # so that the loss of a rank is recorded
        await cancel_all(self._tasks)
        for rank in self._ranks:
            rank.end()
        for rank in self._ranks:
            await rank.process.wait()
        for rank in self._ranks:
            await rank.reports.close()
        if self._rendezvous is not None:
            with contextlib.suppress(OSError):
                self._rendezvous.unlink(missing_ok=True)

    # ---- watching

    async def _listen(self, rank: _Rank) -> None:
        with contextlib.suppress(PeerLost):  # the rank has ended
            while True:
                report = await rank.reports.receive()
                rank.watched.looks = 0
                match report:
                    case ranks.Heartbeat():
                        rank.watched.received(report)
                    case ranks.RankReady():
                        rank.watched.ready = True
                    case ranks.RankRefused(code=code, message=message):
                        self.refusal = self.refusal or error_from_code(code, message)
                        self._lose(rank, f"refused to start: {message}")
                    case ranks.RankFailed(message=message):
                        await asyncio.sleep(CONSEQUENCE)
                        self._lose(rank, f"failed: {message}")

    async def _await_exit(self, rank: _Rank, listening: asyncio.Task[None]) -> None:
        status = await rank.process.wait()
        if status >= 0:
            await asyncio.wait({listening})  # wait for the rank's last report
        if status or not self._stopping:
            self._lose(rank, how_ended(status))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(ranks.HEARTBEAT)
            for rank in self._ranks:
                rank.watched.look()
                rank.watched.stopped = rank.watched.silent > ranks.SILENCE and is_stopped(rank.process.pid)
            found = find_loss([rank.watched for rank in self._ranks])
            if found is not None:
                watched, how = found
                self._lose(self._ranks[watched.number], how)

    def _lose(self, rank: _Rank, how: str) -> None:
        """End all ranks after the first loss. Later losses are its consequences and are not reported."""
        if self.loss is not None:
            return
        rank.lost = True
        self.loss = f"rank {rank.number} of {len(self._ranks)} {how}"
        log.error("%s: all ranks are ended", self.loss)
        self.lost.set()
        for each in self._ranks:
            each.end()


def _shared_memory(size: int) -> IO[bytes]:
    """Open an unnamed file of zeros, in memory."""
    file = os.fdopen(os.memfd_create("ranks"), "w+b")
    file.truncate(size)
    return file
