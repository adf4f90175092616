"""What a document of 4k tokens costs a GPU at the 8B shape: `benchmarks.documents.learned --cost`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common.results import Results, Target
from benchmarks.documents.arms import daemon
from benchmarks.serving.http_case import FULL, SMALL, model_folder
from coserve.client import Client
from coserve.core.limits import MAX_MESSAGES
from coserve.core.schemas.documents import UserQuestion
from coserve.core.schemas.jobs import JobEvent
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.workloads.bundled import bundled_rows

QUESTION = 12
"""Tokens of a question."""
QUANTILES = {"least": 0.0, "p50": 0.5, "p90": 0.9, "most": 1.0}


def cost(options: argparse.Namespace, results: Results, folder: Path) -> None:
    """GPU-seconds of a document of 4k tokens at 8B, on an idle daemon, after a smaller document that warms it.

    Random weights ask hardly two different questions, so that their job would learn next to nothing. Two jobs take its
    place: one that asks, and ends there; one that answers as many questions of the document's words, and learns."""
    size = SMALL if options.tiny else FULL
    model = model_folder(folder / "model", size)
    tokenizer = Tokenizer.load(str(model))
    ids = bundled_tokens(tokenizer, 256 if options.tiny else 4096)
    serving = ["--model", str(model), "--load-format", "dummy", "--device", size.device]
    with daemon([*serving, *options.serve.split()], folder) as url, Client(url) as client:
        client.wait_ready()
        seconds = list[float]()
        for name, tokens in (("warm", ids[: len(ids) // 4]), *((f"run-{n}", ids) for n in range(options.seeds))):
            if seconds and time.monotonic() - options.began > options.seconds:
                break
            asking, chunks = _asking(client, options, name, tokenizer.decode(tokens))
            job = client.learn(
                name,
                tokenizer.decode(tokens),
                questions=questions_of(tokenizer, tokens, options.per_chunk * chunks),
                chunk_tokens=options.chunk_tokens,
                answer_tokens=options.answer_tokens,
                replay=options.replay,
                publish="always",
                training={"steps": options.steps} if options.steps else {},
            )
            info = job.wait(progress=False)
            assert info.document is not None and info.finished_at is not None and info.started_at is not None
            took = asking + info.finished_at - info.started_at
            about: dict[str, object] = {"asking_s": asking, "questions": info.document.questions}
            about |= {"generated_tokens": info.document.generated_tokens}
            about |= {"trained_tokens": info.trained_tokens, "rows": info.rows, "steps": info.step}
            events = [*job.events()]
            phases = phase_times(events, info.started_at)
            steps = {event.metrics.step: event.metrics.seconds for event in events if event.metrics is not None}
            about |= {"steps_s": round(sum(steps.values()), 2), "step_s": shown(sorted(steps.values()))}
            print(name, round(took, 2), about, phases, flush=True)
            if name != "warm":
                seconds.append(round(took, 2))
                middle = sorted(seconds)[len(seconds) // 2]
                target = None if options.tiny else Target(60, most=True)
                results.put("documents.gpu_s.4k", middle, "s", target, seconds, about | {"phases": phases})


def shown(ascending: Sequence[float]) -> dict[str, float]:
    """Return quantiles of the seconds of a job's optimizer steps."""
    return {name: round(ascending[int(at * (len(ascending) - 1))], 3) for name, at in QUANTILES.items()}


def bundled_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """Return so many token ids of the bundled texts, repeated."""
    ids = tokenizer.encode(" ".join(str(row.get("text") or row.get("prompt")) for row in bundled_rows()))
    return (ids * (1 + count // len(ids)))[:count]


def questions_of(tokenizer: Tokenizer, tokens: Sequence[int], count: int) -> list[UserQuestion]:
    """Return so many different questions, as many as a request may have, of the words of a document."""
    count = min(MAX_MESSAGES, count)
    starts = [at * len(tokens) // count for at in range(count)]
    return [
        UserQuestion(f"{at}: {tokenizer.decode(tokens[start : start + QUESTION])}") for at, start in enumerate(starts)
    ]


def _asking(client: Client, options: argparse.Namespace, name: str, text: str) -> tuple[float, int]:
    """Return the seconds in which a job asks its questions, and its document's chunks. The job is cancelled then."""
    job = client.learn(f"{name}-asks", text, questions_per_chunk=options.per_chunk, chunk_tokens=options.chunk_tokens)
    at = next(event.created_at for event in job.events() if event.document and event.document.phase == "answers")
    info = job.refresh()
    assert info.document is not None and info.started_at is not None
    job.cancel()
    return round(at - info.started_at, 2), info.document.chunks


def phase_times(events: Iterable[JobEvent], began: float) -> dict[str, float]:
    """Return when each phase of a document's job began, and when the job was first in each state, in seconds after
    `began`."""
    times = dict[str, float]()
    for event in events:
        name = event.state if event.document is None else event.document.phase
        if name is not None:
            times.setdefault(str(name), round(event.created_at - began, 2))
    return times
