"""Above capacity nobody is late: who cannot be served in time is refused, on a GPU in virtual time that has steps in
flight."""

from __future__ import annotations

import pytest

from benchmarks.scheduling import slack_risk
from tests.support import fake_ports
from tests.support.examples import in_turns


@pytest.mark.parametrize("load", in_turns([(80.0, 1.0), (80.0, 5.0), (120.0, 1.0)], [(80.0, 1.0)]))
def test_above_capacity_no_first_token_is_late(monkeypatch: pytest.MonkeyPatch, load: tuple[float, float]) -> None:
    """`load`: requests a second, and their target."""
    monkeypatch.setattr(slack_risk, "SECONDS", 3 + load[1])  # some seconds longer than a first token may wait
    monkeypatch.setattr(fake_ports, "CONTEXT", fake_ports.CONTEXT)  # so that it is restored
    found = slack_risk.overload(*load, 1)
    assert found.late <= 0.002
    assert found.served >= 45, "the batch is full all the time"
