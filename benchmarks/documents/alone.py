"""What each arm of the documents' benchmark takes by itself: `benchmarks.documents.learned --alone`."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from benchmarks.documents.arms import Arms
from benchmarks.documents.facts import Document
from benchmarks.documents.learning import Learning, learn
from coserve.client import AsyncClient

ROUNDS = 3
WARM_STEPS = 2

Put = Callable[[str, float, str, dict[str, object]], None]
"""Records a value: key, value, unit, and more about it."""


async def alone(
    client: AsyncClient,
    options: argparse.Namespace,
    documents: Sequence[Document],
    learnings: Sequence[Learning],
    put: Put,
    over: Callable[[], bool],
) -> None:
    """Learn the first document by each arm in turn, on an idle daemon that did so with the second in a few steps, which
    compiles what is missing. Then ask its questions of each arm, and with the document in the prompts, by turns.

    `documents.ARM.alone_s`: seconds of the job. `documents.ARM.break_even` (of `topk_kd`: `documents.break_even`):
    requests about the document after which that has cost less time than the document in each prompt would have, found
    in the prefix cache; none: the adapter is not faster. No job begins once `over` returns True.
    """
    document, other = documents
    jobs = dict[str, dict[str, Any]]()
    for learning in learnings:
        if over():
            break
        warm = replace(learning, settings=learning.settings | {"steps": WARM_STEPS})
        await learn(client, options, 0, other, warm, f"warm-{learning.arm}")
        jobs[learning.arm] = job = await learn(client, options, 0, document, learning, f"alone-{learning.arm}")
        about = {name: job[name] for name in ("steps", "rows", "seconds_of", "tokens_of")}
        put(f"documents.{learning.arm}.alone_s", job["seconds"], "s", about)
    times, cached = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    arms = Arms(client, 0, document, [])

    async def ask(arm: str, work: Callable[[], Awaitable[list[Any]]], *, counts: bool) -> None:
        began = time.perf_counter()
        answers = await work()
        if counts:  # the first turn fills the prefix cache
            times[arm].append((time.perf_counter() - began) / len(document.questions))
            cached[arm].append(fmean(each.cached / each.tokens for each in answers))

    for turn in range(ROUNDS + 1):
        await ask("context", lambda: arms.answers(None, document.text), counts=turn > 0)
        for job in jobs.values():
            name = str(job["name"])
            await ask(name, lambda name=name: arms.answers(name, None), counts=turn > 0)  # type: ignore[misc]
    carried = median(times["context"])
    for arm, job in jobs.items():
        without = median(times[job["name"]])
        about = {"learning_s": job["seconds"], "adapter_s": without, "context_s": carried}
        about |= {"context_cached": round(median(cached["context"]), 3)}
        print(f"a request of {arm}:", about, flush=True)
        if carried > without:
            key = "documents.break_even" if arm == "topk_kd" else f"documents.{arm}.break_even"
            put(key, job["seconds"] / (carried - without), "requests", about)
