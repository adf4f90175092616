"""TensorBoard sink: event files, in one folder for each job, one file each time that the run is opened."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar, text

from coserve.api.tracking.points import Point, Run, Text
from coserve.core.names import file_name
from coserve.core.training.jobs import JobState


class TensorBoard:
    """TensorBoard run of one job. A later file begins with a session log, which makes TensorBoard drop the steps from
    there on in earlier files."""

    def __init__(self, folder: Path, run: Run, step: int) -> None:
        # TensorBoard reads files in the order of their names, which have the time in seconds, the host, then the step.
        own = folder / f"{file_name(run.name)}-{run.id}"
        own.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(own / "events"), filename_suffix=f".{step:09d}.coserve")
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(step=step, session_log=start))
        if step == 1:
            self._writer.write_event(Event(step=0, summary=text("settings", _table(run))))

    def write(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        for point in points:
            for name, value in point.values.items():
                summary = scalar(name, value)
                self._writer.write_event(Event(wall_time=point.time, step=point.step, summary=summary))
        for sample in texts:
            summary = text(f"samples/{sample.prompt}", _block(sample.text))
            self._writer.write_event(Event(wall_time=sample.time, step=sample.step, summary=summary))
        self._writer.flush()

    def end(self, state: JobState) -> None:
        self._writer.close()

    def close(self) -> None:
        self._writer.close()


def _table(run: Run) -> str:
    """Return the settings as Markdown, which TensorBoard renders. Names and metadata come from users, so they are
    escaped."""
    rows = (f"|{_cell(name)}|{_cell(value)}|" for name, value in run.settings.items())
    return "\n".join(("|setting|value|", "|---|---|", *rows))


def _block(text: str) -> str:
    """Return a text verbatim, as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cell(value: object) -> str:
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", " ")
