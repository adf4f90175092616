"""A process that starts an engine over caches on disk, serves, and says as JSON what it had to compile.

    python -m tests.support.warm_start SETTINGS

SETTINGS: the configuration as JSON. A GPU is expected.
"""

from __future__ import annotations

import asyncio
import json
import sys

from coserve.config import config_from_json
from coserve.engine.warmup.launch import start_warm_up

REPEATED = (
    *("profile", "training-16", "training-64", "training-256", "blocks-16", "blocks-256", "adapters-16"),
    "adapters-128",
)
"""Parts of the warm-up that are run again, and find everything."""


async def start(settings: str) -> dict[str, object]:
    config = config_from_json(settings.encode())
    started = start_warm_up(config)
    assert started is not None
    from torch._dynamo.utils import counters

    from coserve.core.link.engine import Shutdown
    from coserve.core.link.generation import Generate, Tokens
    from coserve.core.sampling import SamplingParams
    from coserve.core.types import Slo
    from coserve.engine.spatial.training_stream import make_training_stream
    from coserve.engine.starting import follow
    from coserve.engine.warming.compilations import watch_compilations
    from coserve.engine.warming.part_runner import PartRunner
    from coserve.engine.worker import build_engine
    from coserve.model.load import load_base
    from tests.support.local_link import local_pair

    compilations = watch_compilations()
    base = load_base(config.model, device=config.device, dtype=config.dtype, load_format=config.load_format)
    config = config.resolved(device="cuda")
    training = make_training_stream(config, base.device)
    notes = await follow(started.socket, lambda what, done: None)
    api, end = local_pair()
    engine, ready = build_engine(base, config, end, task=started.task, training=training)
    before = len(compilations.kernels)
    running = asyncio.create_task(engine.run())
    for number in range(8):
        api.send(
            Generate(
                id=str(number),
                prompt=tuple(range(3, 8 + 5 * number)),
                sampling=SamplingParams(max_tokens=8, temperature=0.0 if number % 2 else 0.9, ignore_eos=True),
                adapter=None,
                slo=Slo(ttft=60.0, tpot=60.0),
            )
        )
    ended = 0
    while ended < 8:
        message = await api.receive()
        ended += isinstance(message, Tokens) and message.finished is not None
    api.send(Shutdown())
    await running
    serving = compilations.kernels[before:]
    repeated = PartRunner(base, config, started.task)
    # Whichever worker compiled them, before or after it compiled layers: the keys are this process's.
    for name in REPEATED:
        for _ in repeated.run(name):
            pass
    return {
        "notes": [*notes, *(note for note in ready.notes if "could not" in note or "refuses" in note)],
        "kernels": compilations.kernels,
        "serving": serving,
        "graphs": counters["inductor"]["fxgraph_cache_miss"],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(start(sys.argv[1]))), flush=True)
    sys.exit(0)
