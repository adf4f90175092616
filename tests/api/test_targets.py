"""The targets of a request: its own, else its class's, else those of the device."""

from __future__ import annotations

import msgspec
import pytest

from coserve.api.generation.targets import targets_of
from coserve.config import Config
from coserve.core.schemas import GenerateRequest
from coserve.core.types import Slo


def targets(config: Config | None = None, device: str = "cuda:0", **fields: object) -> Slo:
    request = msgspec.convert({"prompt": "x"} | fields, GenerateRequest)
    return targets_of(request, config or Config(), device=device)


def test_the_defaults_are_those_of_the_device() -> None:
    assert targets() == Slo(ttft=1.0, tpot=0.05)
    assert targets(device="cpu") == Slo(ttft=2.0, tpot=0.2)
    assert targets(Config(slo_ttft=3.0), device="cpu") == Slo(ttft=3.0, tpot=0.2)


def test_a_class_has_its_targets_and_a_request_its_own() -> None:
    config = Config(slo_batch_ttft=90.0)
    assert targets(config, slo_class="batch") == Slo(ttft=90.0, tpot=0.5, batch=True)
    assert targets(config, slo_class="batch", slo_tpot=2.0) == Slo(ttft=90.0, tpot=2.0, batch=True)
    assert targets(config, slo_class="interactive", slo_tpot=0.03) == Slo(ttft=1.0, tpot=0.03, shed=True)


@pytest.mark.parametrize(
    ("fields", "shed"),
    [
        ({}, (False, True, False)),
        ({"slo_tpot": 0.1}, (False, True, False)),
        ({"slo_class": "batch"}, (False, True, False)),
        ({"slo_class": "interactive"}, (True, True, False)),
        ({"slo_ttft": 0.5}, (True, True, False)),
        ({"slo_e2e": 5.0, "slo_class": "batch"}, (False, True, False)),
        ({"slo_ttft": 0.5, "n": 2}, (True, True, False)),
    ],
)
def test_only_requests_that_ask_for_a_time_are_shed_unless_the_settings_say_otherwise(
    fields: dict[str, object], shed: tuple[bool, ...]
) -> None:
    assert tuple(targets(Config(shed=which), **fields).shed for which in ("explicit", "all", "off")) == shed
    assert not targets(Config(shed="all", policy="ets"), **fields).shed


def test_who_asks_for_the_time_of_the_whole_answer_is_not_shed_for_the_first_token() -> None:
    found = targets(Config(), slo_e2e=60.0)
    assert (found.shed, found.shed_e2e) == (False, True)
    assert not targets(Config(shed="off"), slo_e2e=60.0).shed_e2e
