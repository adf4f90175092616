"""Parts of a benchmark on several GPUs of one machine at the same time, each part on one GPU in a process of its
own."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.results import Results, merge_results
from benchmarks.peers.processes import module


def add_options(parser: argparse.ArgumentParser, *, gpus: str, scratch: str) -> None:
    """The options that `measure` and `known_keys` read. `gpus`, `scratch`: their help."""
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell may end")
    parser.add_argument("--gpus", type=int, default=1, help=gpus)
    parser.add_argument("--skip-measured", action="store_true", help="leave out cells that --out has already")
    parser.add_argument("--scratch", type=Path, default=None, help=scratch)
    parser.add_argument(
        "--publish", nargs="*", type=Path, help="take in these results, draw, put the keys in summary.json"
    )


def known_keys(options: argparse.Namespace, results: Results) -> set[str]:
    """Rows that are not measured again."""
    return results.keys() if options.skip_measured else set()


def measure(
    options: argparse.Namespace, here: Callable[[Path], None], script: str, file: str, hands: Sequence[Sequence[str]]
) -> None:
    """Measure in this process with `here`, which is given a folder, or on several GPUs, each with a hand's options."""
    warnings.filterwarnings("ignore", message=".* too long and lost a part")  # rows are cut to their length there
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) if options.scratch is None else options.scratch.resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        if options.gpus == 1:
            here(scratch)
            return
        common = ["--budget", str(options.budget), "--commit", options.commit, *["--tiny"] * options.tiny]
        common += ["--skip-measured"] * options.skip_measured
        shares = [[*common, "--scratch", str(scratch / f"gpu{at}"), *hand] for at, hand in enumerate(hands)]
        run_on_gpus(script, shares, options.out, file)


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
    try:
        statuses = [process.wait() for process in processes]
    finally:  # also where this process is ended
        for process in processes:
            process.terminate()
            process.wait()
        for folder in folders:
            if (folder / result).exists():
                merge_results(folder / result, out)
    if any(statuses):
        raise SystemExit(next(status for status in statuses if status))


def deal(parts: Sequence[str], hands: int) -> list[list[str]]:
    """`parts` in turn over at most `hands` hands, none of them empty."""
    return [list(parts[number::hands]) for number in range(min(hands, len(parts)))]
