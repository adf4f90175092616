"""Runs `coserve demo --base NAME`: an adapter of a small real base learns a task, with its accuracy before and after.

The task: a sentence about a meeting, as JSON (`workloads.meetings`). An answer counts if it is exactly the right one.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from coserve.cli.demos.run import daemon
from coserve.client import AsyncClient
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraRequest
from coserve.data.pretrained.source import check_source
from coserve.workloads.meetings import Meeting, meetings

ADAPTER = "meetings"
LORA = LoraRequest(r=8, alpha=16)
TRAINING = TrainingSettings(epochs=1, batch_tokens=128, learning_rate=2e-3, warmup_steps=2)
SHOWN = 3
"""Questions whose answers are shown."""


class Accuracy(NamedTuple):
    """Right answers to unseen questions, of `asked`."""

    before: int
    after: int
    asked: int


async def learn(base: str, report: Path) -> Accuracy:
    """Start a daemon on the base, fine-tune an adapter and test it. Writes `daemon.log` to the folder `report`, which
    exists. Raises `UnsupportedBase` if the base is not installed, and `StartupError` if the daemon does not start or
    the job fails."""
    check_source(base)
    console, (rows, unseen) = Console(), meetings()
    with tempfile.TemporaryDirectory(prefix="coserve-demo-") as folder:
        async with daemon(Path(folder), report / "daemon.log", console, base) as url, AsyncClient(url) as client:
            console.rule(f"1. {base} answers {len(unseen)} questions as it is")
            before = await _answers(client, unseen, None)
            console.rule(f"2. An adapter learns from {len(rows)} others")
            job = await client.finetune(ADAPTER, [one.row for one in rows], lora=LORA, training=TRAINING)
            await job.wait(progress=True)
            console.rule("3. The same questions, answered with the adapter")
            after = await _answers(client, unseen, ADAPTER)
    console.print(_comparison(unseen, before, after))
    found = Accuracy(_right(unseen, before), _right(unseen, after), len(unseen))
    console.print(
        f"right: {found.before} of {found.asked} before, {found.after} of {found.asked} after", highlight=False
    )
    return found


async def _answers(client: AsyncClient, asked: Sequence[Meeting], adapter: str | None) -> list[str]:
    calls = (client.generate(messages=one.messages, adapter=adapter, max_tokens=64, temperature=0) for one in asked)
    return [answer.choices[0].text.strip() for answer in await asyncio.gather(*calls)]


def _right(asked: Sequence[Meeting], answers: Sequence[str]) -> int:
    return sum(text == one.answer for text, one in zip(answers, asked, strict=True))


def _comparison(asked: Sequence[Meeting], before: Sequence[str], after: Sequence[str]) -> Table:
    table = Table(title=f"{SHOWN} of the questions", title_justify="left", show_lines=True)
    for column in ("question", "the base", f"with {ADAPTER}", "right answer"):
        table.add_column(column, overflow="fold")
    for one, first, second in list(zip(asked, before, after, strict=True))[:SHOWN]:
        table.add_row(one.question, first, second, one.answer)
    return table
