"""Command-line options that the benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS = Path("benchmarks/results")


def make_parser(doc: str | None, *, tiny: str | None = None) -> argparse.ArgumentParser:
    """A parser with `--out` and `--commit`, and `--tiny` if it has a help text."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, default=RESULTS)
    found.add_argument("--commit", default="", help="the measured commit, where there is no repository to ask")
    if tiny is not None:
        found.add_argument("--tiny", action="store_true", help=tiny)
    return found


def check_tiny(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits if the numbers of a tiny shape would go to the committed results."""
    if options.tiny and options.out == RESULTS:
        parser.error("--tiny needs an --out of its own: its numbers say nothing")
