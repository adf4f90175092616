"""What requests and a job get from an engine on a GPU, whatever runs beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coserve.engine.spatial.training_stream import TrainingStream
from coserve.model.load import load_base
from tests.support.real_server import serve_real

JOB = {
    "adapter": "learned",
    "data": [{"text": "one two three four five six"}, {"text": "seven eight nine ten eleven"}] * 4,
    "lora": {"r": 8},
    "training": {"steps": 12, "batch_tokens": 64, "checkpoint_steps": 3, "validation_split": 0.25, "eval_steps": 4},
}


async def served(folder: Path, training: TrainingStream | None, **settings: str) -> tuple[list[Any], dict[str, Any]]:
    """Texts before, while and after a job trains, the last with its adapter, and the job's metrics."""
    base = load_base("bundled", device="cuda", dtype="float32")
    async with serve_real(folder, base, training=training, kv_tokens=8192, **settings) as api:

        async def ask(prompt: str, **more: str) -> object:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **more}
            answer = await api.answered(200, "POST", "/generate", json=body)
            return answer["choices"][0]["token_ids"]

        texts = [await ask("Once upon a time")]
        job = await api.answered(202, "POST", "/finetune", json=JOB)
        texts += [await ask(f"Once upon a time there were {n}") for n in ("two", "three", "four", "five")]
        ended = await api.job_until(job["id"], "succeeded")
        texts.append(await ask("one two three", adapter="learned"))
        return texts, ended["metrics"]
