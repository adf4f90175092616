"""When a rank counts as lost: exact, from its heartbeats."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from coserve.cli.daemon.rank_watch import WatchedRank, find_loss
from coserve.core.ranks import FIRST, HANG, HEARTBEAT, LEAST, SILENCE, START_SILENCE
from coserve.engine.ranks.progress import MARGIN, Progress, loaded


class Watched:
    """Two ranks that are ready, and the daemon's looks at their heartbeats."""

    def __init__(self, device: str = "cuda") -> None:
        self.progress = [Progress(), Progress()]
        self.ranks = [WatchedRank(number, ready=True) for number in range(2)]
        for one in self.progress:
            one.ready(device)

    def end(self, kind: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        """A command that takes no time."""
        for rank in ranks:
            with self.progress[rank].command(self.ranks[rank].done + 1, kind):
                pass
        self.look()

    def look(self, silent: tuple[int, ...] = ()) -> str | None:
        """After `HEARTBEAT` seconds: the loss."""
        for number, (rank, progress) in enumerate(zip(self.ranks, self.progress, strict=True)):
            if number not in silent:
                rank.received(progress.heartbeat())
                rank.looks = 0
            rank.look()
        found = find_loss(self.ranks)
        return None if found is None else f"rank {found[0].number} {found[1]}"

    def seconds_until_lost(self, silent: tuple[int, ...] = (), most: float = 1000.0) -> tuple[float, str | None]:
        for count in range(1, int(most / HEARTBEAT)):
            if (loss := self.look(silent)) is not None:
                return count * HEARTBEAT, loss
        return most, None


def test_a_rank_without_heartbeats_is_lost() -> None:
    seconds, loss = Watched().seconds_until_lost(silent=(1,))
    assert SILENCE <= seconds <= SILENCE + 2 * HEARTBEAT
    assert loss == f"rank 1 did not answer for {SILENCE:.0f} s"


def test_a_rank_that_starts_may_be_silent_for_longer() -> None:
    watched = Watched()
    watched.ranks[1].ready = False
    seconds, _ = watched.seconds_until_lost(silent=(1,))
    assert START_SILENCE <= seconds <= START_SILENCE + 2 * HEARTBEAT


def test_a_rank_that_is_stopped_while_it_starts_is_lost_as_soon_as_one_that_was_ready() -> None:
    watched = Watched()
    watched.ranks[1].ready, watched.ranks[1].stopped = False, True
    seconds, loss = watched.seconds_until_lost(silent=(1,))
    assert seconds <= 10.0 and loss == f"rank 1 did not answer for {SILENCE:.0f} s"


def test_a_follower_far_behind_rank_0_lives_while_it_makes_progress() -> None:
    """Rank 0 has finished all commands; the other is in a long one, which goes on."""
    watched, begun = Watched(), 0
    watched.progress[1].watch_collectives(lambda: begun)
    watched.end("Advance")
    watched.end("Launch", ranks=(0,))
    with watched.progress[1].command(2, "Advance"):
        for look in range(400):
            begun += look % 10 == 0  # a collective every 5 s
            assert watched.look() is None


def test_a_hang_is_found_within_ten_seconds_of_the_expected_end() -> None:
    watched = Watched()
    watched.end("Launch")
    watched.end("Advance", ranks=(0,))  # the other rank is furthest behind
    with ExitStack() as stack:
        for number, progress in enumerate(watched.progress):
            stack.enter_context(progress.command(4 - number, "Launch"))
        seconds, loss = watched.seconds_until_lost()
    assert HANG <= seconds <= 10.0
    assert loss == f"rank 1 made no progress for {HANG:.0f} s longer than expected"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_first_command_of_a_kind_may_take_longer(device: str) -> None:
    watched = Watched(device)
    watched.end("Launch")
    with watched.progress[0].command(2, "Advance"):
        seconds, _ = watched.seconds_until_lost()
    assert FIRST[device] <= seconds - HANG <= FIRST[device] + 2 * HEARTBEAT
    assert device == "cpu" or seconds <= 10.0 + HEARTBEAT
    again = Watched(device)
    again.end("Advance")
    with again.progress[0].command(2, "Advance"):
        seconds, _ = again.seconds_until_lost()
    assert LEAST[device] <= seconds - HANG <= LEAST[device] + 2 * HEARTBEAT


@pytest.mark.parametrize("module", ["triton.compiler.compiler", "importlib._bootstrap"])
def test_a_rank_that_compiles_a_kernel_is_waited_for_by_all(module: str) -> None:
    """It is known from the stack: Triton tells of a kernel only once it is compiled."""
    watched = Watched()
    watched.end("Launch")
    scope = {"__name__": module, "inside": lambda: watched.seconds_until_lost(most=100.0)}
    exec("def compile(): return inside()", scope)
    with watched.progress[0].command(2, "Launch"), watched.progress[1].command(2, "Advance"):
        assert scope["compile"]() == (100.0, None)
        seconds, loss = watched.seconds_until_lost()
    assert loss is not None
    assert seconds <= FIRST["cuda"] + HANG + 2 * HEARTBEAT


def test_modules_and_files_that_are_loaded_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (io := tmp_path / "io").write_text("rchar: 7\nread_bytes: 4096\n")
    before = loaded(io)
    monkeypatch.setitem(sys.modules, "a_module_of_this_test", sys)
    assert loaded(io) == before + 1
    io.write_text("rchar: 7\nread_bytes: 8192\n")
    assert loaded(io) == before + 1 + 4096
    assert loaded(tmp_path / "missing") == len(sys.modules)


def test_the_expected_end_follows_earlier_commands_of_the_kind() -> None:
    watched = Watched()
    for _ in range(2):
        with watched.progress[0].command(1, "Advance"):
            for _ in range(8):
                assert watched.look() is None
    watched.look()
    with watched.progress[0].command(3, "Advance"):
        seconds, _ = watched.seconds_until_lost()
    longest = 7 * HEARTBEAT  # the first look saw it begin
    assert MARGIN * longest <= seconds - HANG <= MARGIN * longest + 2 * HEARTBEAT


def test_the_rank_that_did_not_begin_a_collective_is_told_of() -> None:
    """Both are in the same command; rank 0 executed none of the commands before it."""
    watched = Watched()
    watched.end("Launch", ranks=(1,))
    watched.end("Launch", ranks=(1,))
    for number, progress in enumerate(watched.progress):
        progress.watch_collectives(lambda begun=5 - number: begun)  # type: ignore[misc]
    with watched.progress[0].command(3, "Launch"), watched.progress[1].command(3, "Launch"):
        _, loss = watched.seconds_until_lost()
    assert loss is not None and loss.startswith("rank 1 ")


def test_a_hang_in_a_graph_is_told_of_no_rank_alone() -> None:
    """Rank 0 waits for the results of a step that the other has launched as well; what a graph sends is not counted."""
    watched = Watched()
    for progress in watched.progress:
        with progress.command(1, "Launch"):
            pass
    with watched.progress[0].command(1, "collect"):
        _, loss = watched.seconds_until_lost()
    assert loss == f"rank 0 made no progress for {HANG:.0f} s longer than expected, nor did the others"


def test_a_rank_that_compiles_layers_is_not_late() -> None:
    watched, compiles = Watched(), True
    watched.end("Launch")
    watched.progress[0].watch_compiler(lambda: compiles)
    with watched.progress[0].command(2, "Launch"):
        assert watched.seconds_until_lost()[1] is None
        compiles = False
        assert watched.seconds_until_lost()[0] <= 10.0


def test_a_rank_without_a_command_is_not_late() -> None:
    assert Watched().seconds_until_lost()[1] is None
