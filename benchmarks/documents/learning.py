"""Arms that a job makes: their settings, their jobs, and what these took."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.documents.cost import phase_times
from benchmarks.documents.facts import Document
from coserve.client import AsyncClient
from coserve.core.schemas.documents import DocumentSettings, Recipe
from coserve.core.schemas.jobs import JobEvent
from coserve.core.training.settings import TrainingRequest
from coserve.core.types import LoraSettings

PHASES = ("questions", "answers", "training", "evaluation")


@dataclass(frozen=True)
class Learning:
    """An arm that a job makes."""

    arm: str
    recipe: Recipe
    settings: dict[str, Any]
    """Of `document`, `training` or `lora`, by their names there."""

    @classmethod
    def of(cls, text: str) -> Learning:
        """Read RECIPE, or NAME=RECIPE:SETTING=VALUE:..."""
        name, _, rest = text.partition("=")
        recipe, *given = (rest or name).split(":")
        settings = {key: msgspec.json.decode(value) for key, _, value in (each.partition("=") for each in given)}
        return cls(name, msgspec.convert(recipe, Recipe), settings)

    def chosen(self, kind: type[msgspec.Struct]) -> dict[str, Any]:
        """Return the settings that are fields of `kind`."""
        return {name: value for name, value in self.settings.items() if name in kind.__struct_fields__}


async def learn(
    client: AsyncClient, options: argparse.Namespace, seed: int, document: Document, learning: Learning, name: str
) -> dict[str, Any]:
    """Have the daemon learn the document; return the job's record, with the seconds and tokens of its phases."""
    recipe = learning.recipe
    training: dict[str, Any] = {"seed": seed}
    training |= {"steps": options.steps} if options.steps else {}
    training |= {"learning_rate": options.learning_rate} if options.learning_rate else {}
    prefixes = {"cartridge": options.prefix_tokens, "encoder": options.chunk_tokens // 8}
    settings: dict[str, Any] = {
        "prefix_tokens": prefixes.get(recipe),
        "chunk_tokens": options.chunk_tokens,
        "questions_per_chunk": options.per_chunk,
        "replay": options.replay,
        "lm_weight": options.lm_weight,  # None: what the daemon chooses
        "answer_tokens": 64,
        "publish": "always",
    }
    job = await client.learn(
        name,
        document.text,
        recipe=recipe,
        training=training | learning.chosen(TrainingRequest),
        lora=learning.chosen(LoraSettings) or None,
        **(settings | learning.chosen(DocumentSettings)),
    )
    info = await job.wait(progress=False)
    assert info.document is not None and info.finished_at is not None and info.started_at is not None
    about = {"seed": seed, "document": document.name, "recipe": learning.arm, "name": name}
    about |= {"steps": info.step, "rows": info.rows, "seconds": round(info.finished_at - info.started_at, 2)}
    took = phases_took([event async for event in job.events()], info.started_at, info.finished_at)
    return about | took | {"job": msgspec.to_builtins(info.document)}


def phases_took(events: Sequence[JobEvent], began: float, ended: float) -> dict[str, dict[str, float]]:
    """Return, of a document's job, `seconds_of` its phases, in all and in the slices of its `steps`, and `tokens_of`
    those that generate or train: without prompts, and without the evaluation, which generates none."""
    begins = phase_times(events, began)
    at = [*(begins[phase] for phase in PHASES if phase in begins), round(ended - began, 2)]
    known = [phase for phase in PHASES if phase in begins]
    seconds = dict.fromkeys(PHASES, 0.0) | {
        phase: round(end - begin, 2) for phase, begin, end in zip(known, at, at[1:], strict=False)
    }
    steps = {event.metrics.step: event.metrics for event in events if event.metrics is not None}
    seconds["steps"] = round(sum(each.seconds for each in steps.values()), 3)
    generated = [(each.document.phase, each.document.generated_tokens) for each in events if each.document is not None]
    asked = next((tokens for phase, tokens in generated if phase == "answers"), 0)
    tokens: dict[str, float] = {
        "questions": asked,
        "answers": max((tokens for _, tokens in generated), default=0) - asked,
    }
    trained = sum(each.tokens for each in steps.values())
    return {"seconds_of": seconds, "tokens_of": tokens | {"training": trained}}


def means(jobs: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the means of what jobs of one arm took."""
    found: dict[str, object] = {"job_s": fmean(job["seconds"] for job in jobs)}
    for what in ("seconds_of", "tokens_of"):
        if parts := [job[what] for job in jobs if what in job]:
            found[what] = {name: round(fmean(part[name] for part in parts), 2) for name in parts[0]}
    return found
