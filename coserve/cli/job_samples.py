"""Collects the samples of a job from its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coserve.core.schemas import Job, JobEvent, Sample


def collect_samples(job: Job, events: Iterable[JobEvent]) -> Iterator[Sample]:
    """Yield the job's samples, in the order of the events.

    `events` may be live: they are read up to the samples that `job` shows, or the job's end.
    """
    left = {(sample.step, sample.prompt) for sample in job.samples}
    if not left:
        return
    for event in events:
        if event.sample is not None:
            yield event.sample
            left.discard((event.sample.step, event.sample.prompt))
        if not left and not job.state.terminal:
            return
