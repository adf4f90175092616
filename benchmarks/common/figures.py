"""Figures of the results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def panels(
    path: Path, rows: int, columns: int, size: tuple[float, float], title: str = "", *, sharey: bool = False
) -> Iterator[Any]:
    """Panels to draw on, an array (rows, columns) of matplotlib's axes; saved to `path` at the end of the block.
    `size`: in inches."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharey=sharey)
    yield axes
    found.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.savefig(path, dpi=110)
    plt.close(found)
