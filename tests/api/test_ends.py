"""Adapters of the embedding and the head over HTTP on the bundled base: trained, served in one batch with a plain one,
downloaded, imported and continued."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from coserve.core.names import ADAPTER_CONFIG, ADAPTER_FILES
from coserve.core.types import AdapterRef
from coserve.lora.files.tensorfile import read_json
from tests.support.real_jobs import text, train
from tests.support.real_server import serve_real

TOKENS = "lora.trainable_token_indices"
LORA = {
    "plain": {"r": 4},
    "ends": {"r": 3, "targets": ["q_proj", "lm_head"], "trainable_token_indices": {"embed_tokens": [9, 5]}},
}


@pytest.mark.slow
async def test_an_adapter_of_the_ends_is_trained_served_with_others_and_imported_again(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        for name, lora in LORA.items():
            await train(api, name, lora=lora)
        adapters = [None, *LORA]
        alone = [await text(api, adapter) for adapter in adapters]
        assert await asyncio.gather(*(text(api, adapter) for adapter in adapters * 2)) == alone * 2
        assert alone[0] != alone[2]

        files, form = api.folder.adapter(AdapterRef("ends", 1)), aiohttp.FormData()
        config = read_json(files, ADAPTER_CONFIG)
        assert config["target_modules"] == ["q_proj", "lm_head"]
        assert list(config["trainable_token_indices"].values()) == [[9, 5]]
        form.add_field("settings", '{"name": "again"}', content_type="application/json")
        for name in ADAPTER_FILES:
            form.add_field("file", (files / name).read_bytes(), filename=name)
        status, answer = await api.call("POST", "/adapters", data=form)
        assert status == 201, answer
        assert await text(api, "again") == alone[2]

        job = await train(api, "again", continue_from="again")
        assert job["result"] == "again@2"


@pytest.mark.slow
async def test_what_an_adapter_of_the_ends_cannot_learn_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "Today we", "chosen": " sighted land.", "rejected": " slept."}]
    async with serve_real(tmp_path) as api:
        for lora, field in (
            ({"targets": ["lm_head"]}, "lora.targets"),
            ({"targets": ["q_proj", "lm_head"], "use_dora": True}, "lora.use_dora"),
            ({"targets": ["q_proj", "embed_tokens"], "trainable_token_indices": {"embed_tokens": [1]}}, TOKENS),
            ({"trainable_token_indices": {"embed_tokens": [1 << 20]}}, TOKENS),
            ({"trainable_token_indices": {"q_proj": [1]}}, TOKENS),
        ):
            status, answer = await api.call("POST", "/finetune", json={"adapter": "a", "data": rows, "lora": lora})
            assert (status, answer["error"]["field"]) == (400, field), answer
        body = {"adapter": "a", "data": rows, "lora": LORA["ends"], "training": {"loss": {"type": "dpo"}}}
        status, answer = await api.call("POST", "/finetune", json=body)
        assert (status, answer["error"]["field"]) == (400, "training.loss")
        status, answer = await api.call("POST", "/sessions", json={"targets": ["q_proj", "lm_head"]})
        assert (status, answer["error"]["field"]) == (400, "targets")
