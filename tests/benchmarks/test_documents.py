"""What the documents' benchmark reads and counts."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.documents.arms import Row, recovered, right
from benchmarks.documents.cost import phase_times
from benchmarks.documents.facts import FACTS, Question, documents
from benchmarks.documents.learning import Learning
from benchmarks.documents.measured import Measured
from benchmarks.documents.reader import Reader
from benchmarks.documents.reading import COPIES, Batches, Reading
from benchmarks.documents.relations import RELATIONS, of_benchmark
from coserve.core.schemas.documents import DocumentJob, DocumentSettings, Phase
from coserve.core.schemas.jobs import JobEvent
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import TrainingRequest
from coserve.core.types import LoraSettings
from coserve.model.load import load_base


def test_answers_count_by_kind() -> None:
    assert right(Question("two_facts", "?", ("Brovek", "otter")), "In brovek, with an otter.")
    assert not right(Question("template", "?", ("Brovek",)), "In Varn.")
    assert right(Question("unanswerable", "?", ("Brovek", "Varn")), "I do not know.")
    assert not right(Question("unanswerable", "?", ("Brovek", "Varn")), "In Varn.")


def test_phases_are_told_by_name() -> None:
    states = {0: JobState.QUEUED, 1: JobState.RUNNING, 4: JobState.QUEUED, 5: JobState.RUNNING, 9: JobState.SUCCEEDED}
    phases: dict[int, Phase] = {2: "questions", 3: "questions", 4: "training", 6: "evaluation", 8: "done"}
    events = [
        *(
            JobEvent(seq=at, job="j", created_at=100 + at, level="info", type="state", message="job", state=state)
            for at, state in states.items()
        ),
        *(
            JobEvent(
                seq=at,
                job="j",
                created_at=100 + at,
                level="info",
                type="document",
                message=f"{phase}: {at} of 9",
                document=DocumentJob(settings=DocumentSettings(), tokens=9, chunks=1, phase=phase),
            )
            for at, phase in phases.items()
        ),
        JobEvent(seq=7, job="j", created_at=107, level="info", type="message", message="a note"),
    ]
    found = phase_times(sorted(events, key=lambda event: event.seq), 100.5)
    assert found == {
        "queued": -0.5,
        "running": 0.5,
        "questions": 1.5,
        "training": 3.5,
        "evaluation": 5.5,
        "done": 7.5,
        "succeeded": 8.5,
    }


def test_the_recovered_share_is_of_the_contexts_gain() -> None:
    """Summed over documents, of the questions by template alone; the interval is around it."""
    rows = [
        Row(0, document, arm, kind, count, 10, 5.0)
        for document, counts in {"a": (1, 9, 7), "b": (0, 8, 2)}.items()
        for arm, count in zip(("floor", "context", "topk_kd"), counts, strict=True)
        for kind in ("template", "reversed")
    ]
    found = recovered(rows, "topk_kd")
    assert found is not None
    assert found == (pytest.approx(0.5), (0.25, 0.75))
    assert recovered(rows, "cartridge") is None


@pytest.mark.slow
def test_a_base_that_learned_to_read_is_served(tmp_path: Path) -> None:
    """Its loss falls on documents of other wordings than the benchmark's, and its folder is a base's."""
    own = {form.format(name="", value="") for fact in FACTS for form in (*fact.sentences, *fact.questions)}
    assert not own & {f.format(n="", v="") for each in RELATIONS for f in (*each.sentences, *each.questions)}
    reader = Reader("coserve/assets/tiny")
    batch = reader.reading.rows(0, 1, 2048, 1)
    kept = reader.kept(4)
    assert float(reader.divergence(kept).detach()) == pytest.approx(0, abs=1e-5)
    optimizer = torch.optim.AdamW(reader.model.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        loss = reader.loss(batch)
        torch.autograd.backward([loss])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    assert float(reader.divergence(kept).detach()) > 0
    reader.save(tmp_path)
    assert load_base(str(tmp_path), device="cpu", dtype="auto").spec.layers == reader.model.config.num_hidden_layers


def test_a_base_copies_before_it_reads() -> None:
    """Random tokens that stand before the place where they are learned; documents follow."""
    tokenizer = AutoTokenizer.from_pretrained("coserve/assets/tiny")
    batches = islice(Batches(Reading(tokenizer, 0), 0, 1, 1024, 1), COPIES + 1)
    *copies, read = batches
    for rows in copies:
        ids, tree = rows.ids[0].tolist(), rows.tree[0].tolist()
        for at, label in zip(rows.at, rows.labels, strict=True):
            first = tree.index(tree[at])
            begin = first + rows.branch[0, first:].tolist().index(1)
            assert ids[first + at - begin + 1] == label
    assert "Read this text" in tokenizer.decode(read.ids[0])
    assert "Read this text" not in tokenizer.decode(copies[-1].ids[0])


def test_the_benchmarks_wordings_are_read_but_not_asked_for() -> None:
    """Where they are to be taught, and about other names."""
    tokenizer = AutoTokenizer.from_pretrained("coserve/assets/tiny")
    reading = Reading(tokenizer, 0, of_benchmark())
    theirs = re.compile("came into the world|tame|wedding of|was married")
    read = [reading.document(Random(seed), 2, 2048).prefix for seed in range(30)]
    asked = [
        tree.prefix + prompt
        for seed in range(9)
        for tree in [reading.questions(Random(seed), 2048)]
        for prompt, _ in tree.branches
    ]
    found = [[theirs.search(tokenizer.decode(each)) is not None for each in texts] for texts in (read, asked)]
    assert 0 < sum(found[0]) < 20
    assert not any(found[1])


def test_questions_of_a_row_see_their_document_alone() -> None:
    """The loss is that of each prompt by itself."""
    reader = Reader("coserve/assets/tiny")
    tree = reader.reading.document(Random(1), 1, 2048)
    assert len(tree.branches) > 1
    total, tokens = 0.0, 0
    for prompt, answer in tree.branches:
        ids = torch.tensor([[*tree.prefix, *prompt, *answer]])
        with torch.no_grad():
            logprobs = reader.model(input_ids=ids).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
        total -= float(logprobs.gather(1, ids[0, -len(answer) :, None]).sum())
        tokens += len(answer)
    rows = reader.reading.packed([[tree]], 2048)
    assert len(rows.labels) == tokens
    assert float(reader.loss(rows).detach()) == pytest.approx(total / tokens, rel=1e-4)


def test_arms_have_settings_of_their_own() -> None:
    found = Learning.of("slow=topk_kd:learning_rate=6e-4:replay=1:r=8")
    assert (found.arm, found.recipe) == ("slow", "topk_kd")
    assert (found.chosen(TrainingRequest), found.chosen(DocumentSettings), found.chosen(LoraSettings)) == (
        {"learning_rate": 6e-4},
        {"replay": 1},
        {"r": 8},
    )
    assert Learning.of("ce") == Learning("ce", "ce", {})


def test_an_interrupted_run_goes_on_with_what_it_has(tmp_path: Path) -> None:
    """Of the same settings alone."""
    path, row = tmp_path / "rows.json", Row(0, "a", "floor", "template", 1, 10, 5.0)
    first = Measured(path, {"people": "3"})
    first.rows.append(row)
    first.jobs.append({"name": "a-ce"})
    first.save()
    again = Measured(path, {"people": "3"})
    assert (again.rows, again.jobs) == ([row], [{"name": "a-ce"}])
    assert again.has(0, "a", "floor") and not again.has(0, "a", "context") and not again.has(1, "a", "floor")
    with pytest.raises(SystemExit, match="other settings"):
        Measured(path, {"people": "4"})


def test_documents_ask_all_kinds_of_what_they_say() -> None:
    (one,) = documents(1, 4, 20, seed=3)
    assert [sum(each.kind == kind for each in one.questions) for kind in ("template", "two_facts")] == [20, 5]
    assert {each.kind for each in one.questions} == {"template", "reversed", "two_facts", "unanswerable"}
    assert all(answer in one.text for each in one.questions for answer in each.answers)
