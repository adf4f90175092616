"""Parts of a benchmark on several GPUs of one machine at the same time, each part on one GPU in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.processes import module
from benchmarks.serving_results import merge_results


def run_on_gpus(script: str, shares: Sequence[Sequence[str]], out: Path, result: str) -> None:
    """Run `script` with each share of options on a GPU of its own, then merge their files `result` into that of `out`.

    Results of parts that ended before a failure are merged too. Exits with the first status that is not 0.
    """
    folders = [out / f"gpu{number}" for number in range(len(shares))]
    processes = [
        subprocess.Popen(
            module(script, *share, "--out", str(folder)),
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(number)},
        )
        for number, (share, folder) in enumerate(zip(shares, folders, strict=True))
    ]
    statuses = [process.wait() for process in processes]
    for folder in folders:
        if (folder / result).exists():
            merge_results(folder / result, out)
    if any(statuses):
        raise SystemExit(next(status for status in statuses if status))


def deal(parts: Sequence[str], hands: int) -> list[list[str]]:
    """`parts` in turn over at most `hands` hands, none of them empty."""
    return [list(parts[number::hands]) for number in range(min(hands, len(parts)))]
