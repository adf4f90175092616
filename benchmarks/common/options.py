"""Command-line options that the benchmarks share."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

RESULTS = Path("benchmarks/results")


class Parser(argparse.ArgumentParser):
    """Exits if the numbers of a tiny shape would go to the committed results. Once it has parsed, SIGTERM (as `timeout`
    sends it) ends the program as Ctrl-C does, and with it the servers that it has started."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """See the base class."""
        options = super().parse_args(args, namespace)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if getattr(options, "tiny", False) and options.out.resolve() == RESULTS.resolve():
            self.error("--tiny needs an --out of its own: its numbers say nothing")
        return options


def make_parser(doc: str | None, *, tiny: str | None = None) -> Parser:
    """A parser with `--out` and `--commit`, and `--tiny` if it has a help text."""
    found = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, default=RESULTS)
    found.add_argument("--commit", default="", help="the measured commit, where there is no repository to ask")
    if tiny is not None:
        found.add_argument("--tiny", action="store_true", help=tiny)
    return found


def add_names(
    parser: argparse.ArgumentParser,
    option: str,
    known: Collection[str],
    *,
    default: Collection[str] | None = None,
    what: str = "parts",
) -> None:
    """An option that takes some of the `known` names, separated by commas; `default`: these without it, None: all."""
    shown = ", ".join(known)
    parser.add_argument(
        option, type=names_of(known), default=list(known if default is None else default), help=f"{what}: {shown}"
    )


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """A type of options: names separated by commas, all of them known."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        return found

    return names
