"""Adapters with finite weights that are too large: their requests end with an error that names them, all others go
on."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import torch

from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.files import save_adapter
from coserve.model.lora import LoraWeights
from tests.support.api_server import Api
from tests.support.real_server import bundled_base, serve_real


def _save(folder: Path, b: float) -> None:
    spec = bundled_base().spec
    plain = new_adapter(LoraSettings(r=2), spec, seed=0, dtype=torch.float32, device="cpu")
    pairs = {name: LoraPair(pair.a_RD, torch.full_like(pair.b_OR, b), 1.0) for name, pair in plain.sites.items()}
    folder.mkdir(parents=True)
    save_adapter(folder, LoraWeights(plain.settings, pairs), spec)


async def _imported(api: Api, name: str) -> tuple[int, Any]:
    return await api.call("POST", "/adapters", json={"name": name, "path": name})


async def test_logits_that_are_not_finite_end_their_request_with_a_4xx_that_names_the_adapter(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name, value in (("loud", 3e38), ("broken", math.nan), ("quiet", 1e-3)):
        _save(root / name, value)
    async with serve_real(tmp_path / "data", data_root=root) as api:
        assert (await _imported(api, "loud"))[0] == 201
        assert (await _imported(api, "quiet"))[0] == 201
        status, refused = await _imported(api, "broken")
        assert (status, refused["error"]["code"]) == (422, "corrupt_adapter")
        assert "finite" in refused["error"]["message"]
        body = {"prompt": "What is a list?", "max_tokens": 8, "temperature": 0.0}
        quiet = await api.call("POST", "/generate", json=body | {"adapter": "quiet"})
        asked = [{}, {"temperature": 1.0}, {"prompt_logprobs": 1}, {"logprobs": 2, "presence_penalty": 1.0}, {"n": 2}]
        answers = await asyncio.gather(
            *(api.call("POST", "/generate", json=body | {"adapter": "loud"} | more) for more in asked),
            api.call("POST", "/generate", json=body | {"adapter": "quiet"}),
        )
        for status, answer in answers[:-1]:
            assert (status, answer["error"]["code"]) == (422, "non_finite_logits")
            assert "loud@1" in answer["error"]["message"]
        assert answers[-1][1]["choices"] == quiet[1]["choices"]
        async with api.http.post("/generate", json=body | {"adapter": "loud", "stream": True}) as response:
            text = await response.text()
        assert "non_finite_logits" in text
        assert (await api.call("POST", "/generate", json=body))[0] == 200
