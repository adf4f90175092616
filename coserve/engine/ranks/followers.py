"""Rank 0's side of the command channels, one to each follower."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager

import msgspec

from coserve.core.errors import EngineFault, error_from_code
from coserve.core.link.channel import Channel, frame
from coserve.core.link.link import PeerLost
from coserve.engine.ranks.commands import ENGINE_FAULT, Answer, AnyCommand, AnyQuestion, Stop, command_encoder
from coserve.engine.ranks.progress import Progress

log = logging.getLogger(__name__)


class RankLost(EngineFault):
    """A follower is gone. The daemon ends this process too."""


class Answers:
    """The answers to one question, one from each follower."""

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        """`number`: the question's number; `ranks`: the followers."""
        self.number = number
        self._missing, self._found = set(ranks), dict[int, Answer]()
        self._future = Future[list[Answer]]()

    def add(self, rank: int, answer: Answer) -> bool:
        """Add a rank's answer. Returns whether all are now there."""
        self._found[rank] = answer
        self._missing.discard(rank)
        if not self._missing:
            self._future.set_result([self._found[rank] for rank in sorted(self._found)])
        return not self._missing

    def fail(self, error: Exception) -> None:
        self._future.set_exception(error)

    @property
    def complete(self) -> bool:
        """Whether all answers are there, or never will be: then `wait` does not block."""
        return self._future.done()

    def settle(self) -> list[Answer]:
        """Wait for all answers, including errors; return them by rank. Raises `RankLost`."""
        return self._future.result()

    def wait(self) -> list[int]:
        """Wait for all answers and return their values, by rank. Not for the event loop of a running engine.

        Raises the first follower's error as if it were rank 0's own, `EngineFault`, or `RankLost`.
        """
        answers = self._future.result()
        for answer in answers:
            if answer.code == ENGINE_FAULT:
                raise EngineFault(answer.message)
            if answer.code:
                raise error_from_code(answer.code, answer.message)
        return [answer.value for answer in answers]


class Followers:
    """All followers. Each receives commands in the order of the calls of `send` and `ask`, which are thread-safe."""

    def __init__(self, sockets: Sequence[socket.socket], progress: Progress) -> None:
        """`progress`: rank 0's."""
        self._progress = progress
        decoder = msgspec.msgpack.Decoder(Answer)
        self._channels = {rank: Channel[AnyCommand, Answer](sock, decoder) for rank, sock in enumerate(sockets, 1)}
        self._encoder, self._lock = command_encoder(), threading.Lock()
        self._asked = dict[int, Answers]()
        self._lost: RankLost | None = None
        self._closed = False
        self._sent = 0
        """Commands sent so far."""
        for rank, channel in self._channels.items():
            threading.Thread(target=self._receive, args=(rank, channel), name=f"rank-{rank}", daemon=True).start()

    @property
    def size(self) -> int:
        """Number of ranks, this one included."""
        return 1 + len(self._channels)

    def send(self, command: AnyCommand) -> None:
        """Send a command to all followers. Raises `RankLost`."""
        with self._lock:
            self._send(command)

    def ask(self, question: AnyQuestion) -> Answers:
        """Send a question to all followers. Raises `RankLost`."""
        with self._lock:
            number = self._sent + 1
            answers = Answers(number, [*self._channels])
            self._asked[number] = answers
            self._send(msgspec.structs.replace(question, number=number))
        return answers

    @contextmanager
    def asked(self, question: AnyQuestion) -> Iterator[Answers]:
        """Like `together`, for a question: inside, execute it here and wait for the followers' answers."""
        answers = self.ask(question)
        with self.busy(type(question).__name__):
            yield answers

    @contextmanager
    def together(self, command: AnyCommand) -> Iterator[None]:
        """Send a command; execute it on rank 0 inside the context. Not thread-safe. Raises `RankLost`."""
        self.send(command)
        with self.busy(type(command).__name__):
            yield

    def busy(self, kind: str) -> AbstractContextManager[None]:
        """Context for rank 0's own execution of the last command; `kind` as in `Progress.command`."""
        return self._progress.command(self._sent, kind)

    def close(self) -> None:
        """End all followers with the engine."""
        with self._lock:
            if not self._closed and self._lost is None:
                self._closed = True
                with contextlib.suppress(RankLost):
                    self._send(Stop())

    def _send(self, command: AnyCommand) -> None:
        if self._lost is not None:
            raise self._lost
        data = frame(self._encoder, command)
        self._sent += 1
        for rank, channel in self._channels.items():
            try:
                channel.send_frame(data)
            except PeerLost:
                self._lose(rank)
                raise self._lost_rank(rank) from None

    def _receive(self, rank: int, channel: Channel[AnyCommand, Answer]) -> None:
        try:
            while True:
                answer = channel.receive()
                with self._lock:
                    if self._lost is not None:
                        return  # nobody waits for it any more
                    if self._asked[answer.number].add(rank, answer):
                        del self._asked[answer.number]
        except Exception as error:  # an unreadable answer counts as none
            if not isinstance(error, PeerLost):
                log.exception("rank %d: its answers cannot be read", rank)
            with self._lock:
                if not self._closed:
                    self._lose(rank)
        finally:
            channel.close()

    def _lose(self, rank: int) -> None:
        if self._lost is None:
            self._lost = self._lost_rank(rank)
            log.error("%s", self._lost)
        asked, self._asked = self._asked, {}
        for answers in asked.values():
            answers.fail(self._lost)

    def _lost_rank(self, rank: int) -> RankLost:
        return RankLost(f"rank {rank} of {self.size} is gone")
