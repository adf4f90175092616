"""Whether an adapter has learned its document, with answers whose likelihood depends on who gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.api.documents.evaluation import Evaluation
from coserve.core.errors import AdapterNotFound
from coserve.core.schemas.documents import DocumentEvaluation
from coserve.core.schemas.generation import PromptLogprob
from coserve.core.types import AdapterRef
from coserve.data.documents.lessons import Lesson

NEW, CONTEXT = AdapterRef("new", 1), [7, 7]
LESSONS = [Lesson(f"0/{number}", [number], [1, 2, 3], context=CONTEXT) for number in range(4)]
TEXTS = [Lesson(f"reserved/{number}", [number], [1, 2]) for number in range(2)]


class Answering:
    """Gives each token of an answer the log-probability of its adapter, by id, of the chunk's prompt or of the base."""

    def __init__(self, logprobs: dict[str, float]) -> None:
        self.logprobs = logprobs

    async def score(
        self,
        prompt: list[int],
        answer: list[int],
        *,
        top: int,
        adapter: str | None = None,
        snapshot: AdapterRef | None = None,
    ) -> list[PromptLogprob]:
        named = snapshot.id if snapshot is not None else adapter
        if named == "deleted@1":
            raise AdapterNotFound("no adapter 'deleted@1'")
        logprob = self.logprobs[named or ("context" if prompt == CONTEXT else "base")]
        return [PromptLogprob(token, "", "", logprob) for token in answer]


async def evaluated(
    folder: Path, other: str | None, *, deleted: str | None = None, **logprobs: float
) -> DocumentEvaluation:
    """`deleted`: the other adapter that is found first, and is deleted before it is asked."""

    async def show(done: int, total: int) -> None:
        pass

    others = [other] if deleted is None else [deleted, other, other]

    async def find_other() -> str | None:
        return others.pop(0)

    evaluation = Evaluation(folder, Answering(logprobs), show)  # type: ignore[arg-type]
    return await evaluation.run(LESSONS, TEXTS, NEW, 1, find_other, matches=False)


@pytest.mark.parametrize(
    ("other", "new", "learned"),
    [(None, -1.5, True), ("other@1", -1.5, False), ("other@1", -0.5, True), ("other@1", -2.0, False)],
)
async def test_an_adapter_must_beat_the_one_of_another_document(
    tmp_path: Path, other: str | None, new: float, learned: bool
) -> None:
    """And the base: what the form of the answers gains, another document's adapter has, too."""
    found = await evaluated(tmp_path, other, base=-2.0, context=-0.25, new=new, **{"other@1": -1.0})
    assert found.learned is learned
    assert (found.floor.nll, found.in_context.nll, found.adapter.nll) == (2.0, 0.25, -new)
    assert found.recovered == pytest.approx((2 + new) / 1.75)
    assert found.retention == pytest.approx(-new / 2 - 1)
    assert found.other_adapter == other
    assert (found.other and found.other.nll) == (None if other is None else 1.0)


@pytest.mark.parametrize("other", [None, "other@1"])
async def test_an_adapter_that_is_deleted_meanwhile_is_compared_no_more(tmp_path: Path, other: str | None) -> None:
    found = await evaluated(
        tmp_path, other, deleted="deleted@1", base=-2.0, context=-0.25, new=-0.5, **{"other@1": -1.0}
    )
    assert (found.other_adapter, found.learned) == (other, True)
