"""What the outcomes of a slice on all ranks mean for its job."""

from __future__ import annotations

import pytest

from coserve.core.errors import JobOutOfMemory, NonFiniteLoss
from coserve.finetune.sessions.outcome import PEER_FAILED, Outcome, Verdict, judge

MEMORY = JobOutOfMemory.code
DONE, LEFT, FULL = Outcome(), Outcome(PEER_FAILED), Outcome(MEMORY, "no memory")
UPDATED = Outcome(updated=True)


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([DONE, DONE], Verdict()),
        ([DONE, FULL], Verdict(MEMORY, "no memory", retry=True)),
        ([LEFT, FULL, LEFT, FULL], Verdict(MEMORY, "no memory", retry=True)),
        ([UPDATED, FULL], Verdict(MEMORY, "no memory")),
        ([UPDATED, UPDATED], Verdict()),
        ([FULL, Outcome("storage", "disk full")], Verdict(MEMORY, "no memory")),
        ([LEFT, Outcome("storage", "disk full")], Verdict("storage", "disk full")),
        ([Outcome(NonFiniteLoss.code, "nan")] * 2, Verdict(NonFiniteLoss.code, "nan")),
    ],
)
def test_a_job_tries_again_only_where_all_ranks_can(outcomes: list[Outcome], verdict: Verdict) -> None:
    assert judge(outcomes) == verdict
