"""BD-LoRA over HTTP on the bundled base: trained, continued, and served in one batch with plain adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.types import AdapterRef
from coserve.data.corpus.defaults import choose_learning_rate
from coserve.lora.files.tensorfile import TensorFile, read_json
from tests.support.api_server import Api
from tests.support.fake_engine import write_peft
from tests.support.real_server import serve_real, text, train

ROWS = [
    {"prompt": "Today we", "completion": f" sighted {what} to the south."} for what in ("a sail", "land", "a whale")
]
ADAPTERS = {
    "plain": {"r": 5},
    "bd": {"r": 8, "bd_blocks": 4},
    "mlp": {"r": 4, "bd_blocks": 2, "targets": ["up_proj", "down_proj"], "rslora": True},
}


@pytest.fixture
async def poet(api: Api) -> None:
    """A plain adapter to convert."""
    write_peft(api.root / "poet", api.base, rank=4)
    await api.answered(201, "POST", "/adapters", json={"name": "poet", "path": "poet"})


def shape_of(api: Api, ref: AdapterRef, tensor: str) -> tuple[int, ...]:
    with TensorFile(api.folder.adapter(ref), ADAPTER_WEIGHTS) as file:
        return file.entries[f"base_model.model.model.layers.0.{tensor}.weight"].shape


@pytest.mark.slow
async def test_block_diagonal_adapters_are_trained_shown_continued_and_served_with_others(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        for name, lora in ADAPTERS.items():
            job = await train(api, name, lora=lora)
            assert job["lora"]["bd_blocks"] == lora.get("bd_blocks", 1)
        _, listed = await api.call("GET", "/adapters")
        shown = {each["id"]: (each["rank"], each["bd_blocks"]) for each in listed["data"]}
        assert shown == {"bd": (8, 4), "mlp": (4, 2), "plain": (5, 1)}
        assert shape_of(api, AdapterRef("bd", 1), "mlp.up_proj.lora_B") == (688, 2)
        assert shape_of(api, AdapterRef("bd", 1), "mlp.down_proj.lora_A") == (8, 172)

        adapters = [None, *ADAPTERS]
        alone = [await text(api, adapter) for adapter in adapters]
        assert await asyncio.gather(*(text(api, adapter) for adapter in adapters * 2)) == alone * 2
        assert len(set(alone)) > 1

        status, done = await api.call("POST", "/adapters/plain/convert", json={"bd_blocks": 2, "max_error": 0})
        assert (status, done["adapter"]["ref"], done["rank"], done["smallest_rank"]) == (201, "plain-bd2@1", 10, 10)
        assert (done["adapter"]["bd_blocks"], done["adapter"]["source"]) == (2, "convert:plain@1")
        assert done["error"] < 1e-6 and done["errors"]["2"] > 0.01
        assert await text(api, "plain-bd2") == await text(api, "plain")

        job = await train(api, "plain-bd2", continue_from="plain-bd2")
        assert (job["result"], job["lora"]["bd_blocks"], job["lora"]["r"]) == ("plain-bd2@2", 2, 10)

        done = await api.answered(
            201, "POST", "/adapters/plain/convert", json={"bd_blocks": 2, "rank": 2, "name": "small"}
        )
        taught = {
            "continue_from": "small",
            "teacher": "plain",
            "data": ROWS,
            "training": {"steps": 4, "batch_tokens": 64, "validation_split": 0.34},
        }
        job = await train(api, "small", **taught)
        assert (job["result"], job["teacher"], job["lora"]["bd_blocks"]) == ("small@2", "plain@1", 2)
        metrics = job["metrics"]
        assert 0 <= metrics["valid_loss"] < 2 and 0 < metrics["valid_loss_before"] < 2, "divergences"

        job = await train(api, "bd", continue_from="bd")
        assert (job["result"], job["lora"]["bd_blocks"]) == ("bd@2", 4)
        assert (await api.call("GET", "/adapters/bd"))[1]["bd_blocks"] == 4
        assert read_json(api.folder.adapter(AdapterRef("bd", 2)), ADAPTER_CONFIG)["use_bdlora"] == {
            "target_modules_bd_a": ["o_proj", "down_proj"],
            "target_modules_bd_b": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
            "nblocks": 4,
            "match_strict": True,
        }


@pytest.mark.usefixtures("poet")
async def test_an_adapter_is_converted_to_another_name_and_back(api: Api) -> None:
    body = {"bd_blocks": 2, "rank": 4, "name": "bard"}
    status, done = await api.call("POST", "/adapters/poet@1/convert", json=body)
    assert (status, done["adapter"]["ref"], done["adapter"]["rank"]) == (201, "bard@1", 4), done
    status, done = await api.call("POST", "/adapters/bard/convert", json={"bd_blocks": 1})
    assert (status, done["adapter"]["ref"], done["adapter"]["bd_blocks"]) == (201, "bard-lora@1", 1)
    assert list(api.folder.staging.iterdir()) == []


@pytest.mark.usefixtures("poet")
async def test_conversions_that_are_refused_leave_nothing(api: Api) -> None:
    refused: list[tuple[str, dict[str, object], int, str]] = [
        ("poet", {"bd_blocks": 0}, 400, "bd_blocks"),
        ("poet", {"bd_blocks": 3}, 400, "bd_blocks"),
        ("poet", {"bd_blocks": 2, "rank": 3}, 400, "rank"),
        ("poet", {"bd_blocks": 2, "rank": 1 << 64}, 400, "rank"),
        ("poet", {"bd_blocks": 2, "distill": True}, 400, "distill"),
        ("poet", {"bd_blocks": 2, "name": "fake"}, 400, "name"),
        ("nobody", {"bd_blocks": 2}, 404, "adapter"),
    ]
    for path, body, status, field in refused:
        got, answer = await api.call("POST", f"/adapters/{path}/convert", json=body)
        assert (got, answer["error"]["field"]) == (status, field), answer
        assert api.folder.adapter_refs() == [AdapterRef("poet", 1)]
        assert list(api.folder.staging.iterdir()) == []


@pytest.mark.usefixtures("poet")
async def test_a_conversion_may_submit_the_job_that_distills_it(api: Api) -> None:
    distill: dict[str, Any] = {"data": [{"text": "a b"}, {"text": "b a"}], "training": {"steps": 1}}
    body = {"bd_blocks": 2, "rank": 4, "distill": distill}
    status, done = await api.call("POST", "/adapters/poet/convert", json=body)
    assert (status, done["adapter"]["ref"]) == (201, "poet-bd2@1"), done
    _, job = await api.call("GET", f"/finetune/{done['job']}")
    assert (job["adapter"], job["continue_from"], job["teacher"], job["rows"]) == (
        "poet-bd2",
        "poet-bd2@1",
        "poet@1",
        2,
    )
    assert job["training"]["learning_rate"] == pytest.approx(choose_learning_rate(api.base.hidden) / 4, rel=0.05)
    refused = body | {"name": "other", "distill": distill | {"data": [{"text": "a b"}, {"nothing": "x"}]}}
    status, answer = await api.call("POST", "/adapters/poet/convert", json=refused)
    assert status in (400, 422), answer
    assert {ref.id for ref in api.folder.adapter_refs()} == {"poet", "poet-bd2"}, "nothing is published"
    assert (await api.call("GET", "/adapters/other"))[0] == 404


@pytest.mark.usefixtures("poet")
async def test_a_conversion_ends_with_its_client(api: Api) -> None:
    call = asyncio.create_task(api.call("POST", "/adapters/poet/convert", json={"bd_blocks": 2}))
    async with asyncio.timeout(60):
        while not list(api.folder.staging.iterdir()):  # noqa: ASYNC110 - files send no event
            await asyncio.sleep(0.01)
        call.cancel()  # while its process starts
        while list(api.folder.staging.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert api.folder.adapter_refs() == [AdapterRef("poet", 1)]
    assert (await api.call("POST", "/adapters/poet/convert", json={"bd_blocks": 2}))[0] == 201


@pytest.mark.usefixtures("poet")
async def test_a_conversion_whose_source_is_deleted_finds_no_adapter(api: Api) -> None:
    call = asyncio.create_task(api.call("POST", "/adapters/poet/convert", json={"bd_blocks": 2}))
    async with asyncio.timeout(60):
        while not list(api.folder.staging.iterdir()):  # noqa: ASYNC110 - files send no event
            await asyncio.sleep(0.001)
        assert (await api.call("DELETE", "/adapters/poet"))[0] == 200  # while its process starts
        status, answer = await call
    assert (status, answer["error"]["code"]) == (404, "adapter_not_found"), answer
    assert api.folder.adapter_refs() == []
