"""Numbers at the edges: requests within the limits are answered; adapters that are too large fail theirs alone."""

from __future__ import annotations

import asyncio
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.files import save_adapter
from coserve.model.lora import LoraWeights
from tests.support.api_server import Api
from tests.support.examples import examples
from tests.support.real_server import bundled_base, serve_real

SPANS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
TINY = (5e-324, 2.2250738585072014e-308, 1e-300, 1e-45, 1.1754943508222875e-38, 1e-20, 1e-8, 1e-5)


def extremes(low: float, high: float) -> list[float]:
    """Both ends, and what is nearest to them and to 0, in fp32 and fp64."""
    below_one = struct.unpack("<f", struct.pack("<I", 0x3F7FFFFF))[0]
    return [low, high, below_one, 1 - 2**-53, *TINY, *(-tiny for tiny in TINY if low < 0)]


def refused(case: dict[str, Any]) -> set[str]:
    """The fields of the case that are outside the limits."""
    found = {"top_p"} if case.get("top_p", 1.0) <= 0 else set()
    return found | ({"repetition_penalty"} if case.get("repetition_penalty", 1.0) < 0.01 else set())


@pytest.mark.slow
async def test_every_number_within_the_limits_is_answered(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{name: value} for name, span in SPANS.items() for value in extremes(*span)]
    rng = random.Random(11)
    cases += [{name: rng.choice(extremes(*span)) for name, span in SPANS.items()} for _ in range(examples(40))]
    cases += [{"logit_bias": {"5": value}} for value in (-100, 100, 5e-324)]
    cases += [{"logit_bias": {str(id): -100 for id in range(1024)}, "temperature": 5e-324}]
    cases += [{"top_k": 2**31 - 1}, {"seed": 2**62 - 1}, {"slo_ttft": 0.001, "slo_tpot": 0.001}]
    async with serve_real(tmp_path / "data") as api:
        for case in cases:
            body = {"prompt": "the cat", "max_tokens": 2, "ignore_eos": True, **case}
            status, answer = await api.call("POST", "/generate", data=json.dumps(body))
            fields = refused(case)
            assert status == (400 if fields else 200), (case, answer)
            if fields:
                assert answer["error"]["code"] == "invalid_request", (case, answer)
                assert answer["error"]["field"] in fields, (case, answer)


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
