"""Three jobs over HTTP that train in common batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.real_server import serve_real

ROWS = [{"text": f"line {number} of a short song"} for number in range(6)]


async def test_three_jobs_train_together_and_each_tells_its_own_story(tmp_path: Path) -> None:
    async with serve_real(tmp_path, policy="ets") as api:
        jobs = []
        for number, rank in enumerate((2, 4, 8)):
            training = {"steps": 20 + number, "batch_tokens": 32, "seed": number}
            body = {"adapter": f"a{number}", "data": ROWS, "lora": {"r": rank}, "training": training}
            job = await api.answered(202, "POST", "/finetune", json=body)
            jobs.append(job["id"])
        await asyncio.gather(*(api.job_until(job, "succeeded") for job in jobs))
        for number, job in enumerate(jobs):
            steps = [event["metrics"]["step"] for _, event in await api.events(job) if event["metrics"]]
            assert steps == list(range(1, 21 + number))
        assert api.service.engine.stats is not None
        batches = api.service.engine.stats.batches
        assert batches.jobs > batches.count > 0, "they shared some"
