"""TensorBoard event files, read by TensorBoard itself."""

from __future__ import annotations

import warnings
from pathlib import Path


def read_curve(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """Step and value of one scalar, as TensorBoard shows them."""
    if not folder.is_dir():
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
        tags = events.Tags()
        if tag in tags["scalars"]:
            return [(event.step, event.value) for event in events.Scalars(tag)]
        if tag not in tags["tensors"]:
            return []
        return [(event.step, float(event.tensor_proto.float_val[0])) for event in events.Tensors(tag)]
