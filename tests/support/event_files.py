"""TensorBoard event files, read by TensorBoard itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_curve(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """Step and value of one scalar, as TensorBoard shows them."""
    if not folder.is_dir():
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = _read(folder)
        tags = events.Tags()
        if tag in tags["scalars"]:
            return [(event.step, event.value) for event in events.Scalars(tag)]
        if tag not in tags["tensors"]:
            return []
        return [(event.step, float(event.tensor_proto.float_val[0])) for event in events.Tensors(tag)]


def read_texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    """Step and Markdown of one text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(event.step, event.tensor_proto.string_val[0].decode()) for event in _read(folder).Tensors(tag)]


def _read(folder: Path) -> EventAccumulator:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events
