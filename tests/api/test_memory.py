"""GPU memory over HTTP: jobs that never fit are refused, jobs that wait say why, /health and /metrics show where the
bytes are."""

from __future__ import annotations

from pathlib import Path

from coserve.core.gpu_memory import MemoryModel
from coserve.core.link.jobs import JobNote, JobWaiting, StartJob
from coserve.core.link.link import ToEngine
from tests.support.api_server import Api, scrape, serve_api
from tests.support.fake_engine import FakeEngine
from tests.support.gpu_memory import COSTS, MIB, USE

ROWS = [{"text": "one two three"}, {"text": "four"}]


class Small(FakeEngine):
    """Its GPU has little memory for jobs."""

    memory = MemoryModel(costs=COSTS, training=80_000)


def request(rank: int) -> dict[str, object]:
    return {"adapter": "poet", "data": ROWS, "lora": {"r": rank}, "training": {"steps": 3}}


async def test_a_job_that_never_fits_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async with serve_api(tmp_path, engine_type=Small) as api:
        refused = await api.refused(422, "job_too_large", "POST", "/finetune", json=request(256))
        assert refused["field"] == "lora"
        assert "at most 80000 bytes" in refused["message"] and "a smaller rank" in refused["message"]
        assert not any(api.folder.staging.iterdir()), "its corpus is gone"
        await api.answered(202, "POST", "/finetune", json=request(2))
        (told,) = await api.engine.saw(StartJob)
        assert 0 < told.spec.longest < told.spec.tokens, "of the longest of two rows"


async def test_a_job_in_line_says_that_it_waits_and_later_how_it_trains(api: Api) -> None:
    api.engine.obeys = False
    _, job = await api.call("POST", "/finetune", json=request(2))
    await api.hear(JobWaiting(id=job["id"], message="waiting for memory: 5 bytes"))
    _, now = await api.call("GET", f"/finetune/{job['id']}")
    assert (now["state"], now["queue_position"], now["waiting"]) == ("queued", 0, "waiting for memory: 5 bytes")
    for _ in range(2):
        await api.hear(JobNote(id=job["id"], message="memory: it trains on less", kept=True))
    await api.hear(JobNote(id=job["id"], message="a warning alone"))
    _, now = await api.call("GET", f"/finetune/{job['id']}")
    assert now["notes"] == ["memory: it trains on less"]


class Deaf(FakeEngine):
    def handle(self, message: ToEngine) -> None:
        pass


async def test_a_new_engine_says_anew_why_a_job_in_line_waits(api: Api) -> None:
    api.engine.obeys, api.engine_type = False, Deaf
    _, job = await api.call("POST", "/finetune", json=request(2))
    await api.hear(JobWaiting(id=job["id"], message="waiting for memory: 5 bytes"))
    await api.engine.die()
    await api.start_engine()
    _, now = await api.call("GET", f"/finetune/{job['id']}")
    assert (now["state"], now["waiting"]) == ("queued", None)


async def test_health_and_metrics_show_where_the_bytes_are(api: Api) -> None:
    _, health = await api.call("GET", "/health")
    assert health["memory"] is None
    api.engine.stats(memory=USE)
    await api.works()
    _, health = await api.call("GET", "/health")
    assert health["memory"]["jobs"] == 40 * MIB
    assert health["memory"]["each"][0]["id"] == "job-7"
    found = await scrape(api)
    uses = {name: value for name, value in found.items() if name.startswith("coserve_gpu_memory_bytes")}
    assert sum(uses.values()) == USE.total
    assert uses["coserve_gpu_memory_bytes,use=graphs"] == 50 * MIB
    assert found["coserve_jobs_memory_needed_bytes"] == 140 * MIB
    assert found["coserve_jobs_memory_limit_bytes"] == 500 * MIB
