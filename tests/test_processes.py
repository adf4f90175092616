"""How many processor cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coserve.processes import usable_cores


@pytest.mark.parametrize(("written", "most"), [("100000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", 10**6)])
def test_a_containers_quota_is_obeyed(tmp_path: Path, written: str, most: int) -> None:
    (tmp_path / "cpu.max").write_text(written)
    assert usable_cores(tmp_path / "cpu.max") == min(most, usable_cores(tmp_path / "missing"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_so_is_the_cpu_affinity(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores(tmp_path / "missing") == 1
    finally:
        os.sched_setaffinity(0, before)
