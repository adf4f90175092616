"""What the outcomes of a slice on all ranks mean for its job."""

from __future__ import annotations

import pytest

from coserve.core.errors import JobOutOfMemory, NonFiniteLoss
from coserve.finetune.outcome import PEER_FAILED, Outcome, Verdict, judge

MEMORY = JobOutOfMemory.code
DONE, LEFT, FULL = Outcome(7), Outcome(7, PEER_FAILED), Outcome(7, MEMORY, "no memory")


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([DONE, DONE], Verdict()),
        ([DONE, FULL], Verdict(MEMORY, "no memory", retry=True)),
        ([LEFT, FULL, LEFT, FULL], Verdict(MEMORY, "no memory", retry=True)),
        ([Outcome(8), FULL], Verdict(MEMORY, "no memory")),  # rank 0 has updated its weights
        ([FULL, Outcome(7, "storage", "disk full")], Verdict(MEMORY, "no memory")),
        ([LEFT, Outcome(7, "storage", "disk full")], Verdict("storage", "disk full")),
        ([Outcome(7, NonFiniteLoss.code, "nan")] * 2, Verdict(NonFiniteLoss.code, "nan")),
    ],
)
def test_a_job_tries_again_only_where_all_ranks_can(outcomes: list[Outcome], verdict: Verdict) -> None:
    assert judge(outcomes) == verdict
