"""DoRA, and adapters of the embedding and the head, over HTTP on the bundled base: trained, served in one batch with a
plain one, downloaded, imported and continued; and what they cannot learn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from coserve.core.names import ADAPTER_CONFIG, ADAPTER_FILES
from coserve.core.types import AdapterRef
from coserve.lora.files.tensorfile import read_json
from tests.support.api_server import Api, form
from tests.support.real_server import serve_real, text, train

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
TOKENS = "lora.trainable_token_indices"
LORA: dict[str, dict[str, Any]] = {
    "plain": {"r": 4},
    "dora": {"r": 3, "use_dora": True, "dropout": 0.1},
    "ends": {"r": 3, "targets": ["q_proj", "lm_head"], "trainable_token_indices": {"embed_tokens": [9, 5]}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """With an adapter of each kind."""
    async with serve_real(tmp_path_factory.mktemp("kinds")) as api:
        for name, lora in LORA.items():
            job = await train(api, name, lora=lora)
            assert job["lora"]["use_dora"] == lora.get("use_dora", False)
        yield api


async def test_they_are_served_in_one_batch_with_others(api: Api) -> None:
    adapters = [None, *LORA]
    alone = [await text(api, adapter) for adapter in adapters]
    assert await asyncio.gather(*(text(api, adapter) for adapter in adapters * 2)) == alone * 2
    assert alone[0] not in alone[2:]


@pytest.mark.parametrize("kind", ["dora", "ends"])
async def test_their_files_are_imported_again_and_continued(api: Api, kind: str) -> None:
    files = api.folder.adapter(AdapterRef(kind, 1))
    config, again = read_json(files, ADAPTER_CONFIG), f"{kind}-again"
    if kind == "dora":
        assert config["use_dora"] is True
    else:
        assert config["target_modules"] == ["q_proj", "lm_head"]
        assert list(config["trainable_token_indices"].values()) == [[9, 5]]
    upload = form({"name": again}, *(files / name for name in ADAPTER_FILES))
    await api.answered(201, "POST", "/adapters", data=upload)
    assert await text(api, again) == await text(api, kind)
    job = await train(api, again, continue_from=again)
    assert (job["result"], job["lora"]["use_dora"]) == (f"{again}@2", kind == "dora")


async def test_what_they_cannot_learn_is_refused(api: Api) -> None:
    rows = [{"prompt": "Today we", "chosen": " sighted land.", "rejected": " slept."}]
    for lora, field in (
        ({"targets": ["lm_head"]}, "lora.targets"),
        ({"targets": ["q_proj", "lm_head"], "use_dora": True}, "lora.use_dora"),
        ({"targets": ["q_proj", "embed_tokens"], "trainable_token_indices": {"embed_tokens": [1]}}, TOKENS),
        ({"trainable_token_indices": {"embed_tokens": [1 << 20]}}, TOKENS),
        ({"trainable_token_indices": {"q_proj": [1]}}, TOKENS),
    ):
        body = {"adapter": "a", "data": rows, "lora": lora}
        assert (await api.answered(400, "POST", "/finetune", json=body))["error"]["field"] == field
    body = {"adapter": "a", "data": rows, "lora": LORA["ends"], "training": {"loss": {"type": "dpo"}}}
    assert (await api.answered(400, "POST", "/finetune", json=body))["error"]["field"] == "training.loss"
    answer = await api.answered(400, "POST", "/sessions", json={"targets": ["q_proj", "lm_head"]})
    assert answer["error"]["field"] == "targets"
    answer = await api.answered(400, "POST", "/adapters/dora/convert", json={"bd_blocks": 2})
    assert answer["error"]["field"] == "bd_blocks"
