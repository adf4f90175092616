"""What a real daemon leaves for other users of the machine to read: nothing."""

from __future__ import annotations

import stat

from tests.support.crash_oracle import KEY, Reference


def test_files_are_for_their_owner(reference: Reference) -> None:
    files = [reference.data, *reference.data.rglob("*")]
    assert len(files) > 5
    open_to_others = [path for path in files if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert not open_to_others


def test_nothing_listens_but_the_api(reference: Reference) -> None:
    assert len(reference.listening) == 1


def test_child_processes_do_not_know_the_key(reference: Reference) -> None:
    assert len(reference.children) >= 2  # the engine, and the process that tokenised
    assert not [child for child in reference.children if KEY.encode() in child]
