"""Numbers at the edges of what a request may say: a real engine answers each that is within the limits."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import examples
from tests.support.real_server import serve_real

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
