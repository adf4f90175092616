"""What `/health` tells an operator of how the engine runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.link import EngineNotes, Starving
from tests.support.api_server import serve_api
from tests.support.real_server import serve_real


@pytest.mark.parametrize(("load_format", "says"), [("auto", False), ("dummy", True)])
async def test_random_weights_are_owned_up_to(tmp_path: Path, load_format: str, says: bool) -> None:
    async with serve_real(tmp_path, load_format=load_format) as api:
        _, health = await api.call("GET", "/health")
    assert any("random" in note for note in health["notes"]) is says


async def test_the_engine_may_say_something_else_later(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        api.engine.link.send(EngineNotes(notes=("compiled",)))
        await api.works()
        _, health = await api.call("GET", "/health")
    assert health["notes"] == ["compiled"]


async def test_training_that_starves_is_explained(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        api.engine.stats(patience_slices=7, starving=Starving(seconds=12.4, piece=0.21, slack=0.15))
        await api.works()
        _, health = await api.call("GET", "/health")
        async with api.http.get("/metrics") as response:
            page = await response.text()
    assert health["notes"][-1] == (
        "training runs only by train_patience since 12 s: a piece is predicted at 210 ms, the slack is 150 ms"
    )
    assert "coserve_train_patience_slices_total 7.0" in page
