"""Documents over HTTP, with a real engine on the bundled base: every phase, every recipe, and refusals."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coserve.cli.app import run
from coserve.client import AsyncClient
from coserve.core.errors import InvalidRequest, NotLearned
from tests.support.api_server import Api
from tests.support.documents import ASKED, SMALL, TEXT
from tests.support.examples import in_turns
from tests.support.real_server import serve_real

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = {"steps": 1, "learning_rate": 1e-12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "root").mkdir()
    (folder / "root" / "bridge.md").write_text(TEXT)
    async with serve_real(folder / "data", data_root=folder / "root") as api:
        yield api


async def learn(api: Api, adapter: str, steps: int = 2, **document: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events and the ended job of a document."""
    body = {"adapter": adapter, "document": SMALL | document, "training": {"steps": steps, "learning_rate": 4e-3}}
    job = await api.answered(202, "POST", "/finetune", json=body)
    document = job["document"]
    assert (document["phase"], document["done"], document["total"]) == (
        "chunks",
        document["chunks"],
        document["chunks"],
    )
    assert (await api.call("GET", "/health"))[1]["jobs"] == 1
    events = [event for _, event in await api.events(job["id"])]
    return events, (await api.call("GET", f"/finetune/{job['id']}"))[1]


async def test_a_document_goes_through_its_phases_and_is_served(api: Api) -> None:
    events, job = await learn(api, "bridge", steps=12, questions_per_chunk=5)
    assert job["state"] == "succeeded", job["error"]
    shown = [event["document"] for event in events if event["type"] == "document"]
    phases = [phase for phase, _ in groupby(each["phase"] for each in shown)]
    assert phases == ["chunks", "questions", "answers", "training", "evaluation", "done"]
    assert [each["total"] for each in shown if each["phase"] == "training"] == [12], "the steps"
    states = [event["state"] for event in events if event["type"] == "state"]
    assert states == ["queued", "running", "queued", "running", "succeeded"]
    found = job["document"]["evaluation"]
    assert found["in_context"]["exact_match"] == 1, "the expected answers are the base's own"
    assert found["in_context"]["nll"] < found["adapter"]["nll"] < found["floor"]["nll"]
    assert 0 < found["recovered"] < 1
    assert any("no adapter of another document" in note for note in job["notes"]) is found["learned"]
    assert job["rows"] >= 2
    assert job["document"]["generated_tokens"] > 0
    await api.answered(200, "POST", "/generate", json={"prompt": "Where?", "adapter": job["result"]})
    _, again = await learn(api, "again", steps=1, **ASKED)
    assert again["document"]["evaluation"]["other_adapter"] is None, "that adapter knows the same document"
    _, second = await learn(api, "second", steps=1, text=TEXT.replace("Orvane", "Selkie"), **ASKED)
    assert second["document"]["evaluation"]["other_adapter"] == "again@1"
    assert second["document"]["evaluation"]["other"]["nll"] > 0


RECIPES: dict[str, dict[str, Any]] = {
    "ce": ASKED | {"recipe": "ce", "lm_weight": 0.1},
    "lm": ASKED | {"recipe": "lm"},
    "none": {"generator": "none"},
    "path and adapter": {"text": None, "path": "bridge.md", "generator": "adapter:asker"}
    | {"chunk_tokens": 64, "questions_per_chunk": 2},
    "own questions": {
        "questions": [{"question": "How long is it?", "answer": "412 metres"}, {"question": "What colour is it?"}]
    },
}


@pytest.mark.parametrize("document", in_turns(RECIPES, ["none"], days=2))
@pytest.mark.slow
async def test_recipes_and_generators(api: Api, document: dict[str, Any]) -> None:
    if document.get("generator") == "adapter:asker":
        _, made = await api.call(
            "POST", "/finetune", json={"adapter": "asker", "data": [{"text": TEXT}], "training": ONE}
        )
        await api.events(made["id"])
    _, job = await learn(api, "other", steps=1, **document)
    assert job["state"] == "succeeded", job["error"]
    found = job["document"]["evaluation"]
    assert (found["adapter"]["exact_match"] is None) == (document.get("generator") == "none")
    if "questions" in document:
        asked = len(document["questions"])
        held = asked if document.get("recipe") == "lm" else asked // 2
        assert (job["document"]["questions"], found["questions"]) == (asked, held)
    if "path" in document:
        assert job["document"]["chunks"] > 1
        assert job["document"]["settings"]["generator"] == "adapter:asker@1"


@pytest.mark.slow
async def test_what_has_learned_nothing_is_not_published(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    body = {"adapter": "nothing", "document": SMALL | ASKED | {"publish": "if_learned"}}
    body["training"] = {"steps": 1, "learning_rate": 1e-12}
    _, job = await api.call("POST", "/finetune", json=body)
    events = await api.events(job["id"])
    _, job = await api.call("GET", f"/finetune/{job['id']}")
    assert (job["state"], job["error"]["code"], job["result"]) == ("failed", "not_learned", None)
    found = job["document"]["evaluation"]
    assert found["learned"] is False
    assert f"nats a token: floor {found['floor']['nll']:.3f}, " in job["error"]["message"]
    assert events[-1][1]["state"] == "failed"
    assert (await api.call("GET", "/adapters/nothing"))[0] == 404
    await api.settled()
    assert not api.folder.job(job["id"]).exists()
    _, told = await learn(api, "told", steps=1, **ASKED)
    assert any("do not show" in note for note in told["notes"]) is not told["document"]["evaluation"]["learned"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [text for text in warnings if job["id"] in text]


@pytest.mark.slow
async def test_what_is_no_better_than_another_documents_adapter_is_told_so(api: Api) -> None:
    """It is not published, or with a note; the job's record has what was compared."""
    _, known = await learn(api, "known", steps=12, **ASKED)
    assert known["state"] == "succeeded"
    for publish in ("if_learned", "always"):
        _, job = await learn(
            api, "less", steps=2, **ASKED, text=TEXT.replace("1911", "1912"), recipe="ce", publish=publish
        )
        found = job["document"]["evaluation"]
        assert found["other_adapter"] == "known@1"
        assert found["other"]["nll"] < found["adapter"]["nll"] < found["floor"]["nll"]
        assert found["in_context"]["nll"] > 0 and found["retention"] != 0
        assert found["learned"] is False
        told = "better than the base without the document and than known@1 of another document (nats a token: floor "
        if publish == "always":
            assert job["result"] == "less@2"
            assert any(told in note for note in job["notes"])
        else:
            assert (job["state"], job["error"]["code"], job["result"]) == ("failed", "not_learned", None)
            assert told in job["error"]["message"]
            assert (await api.call("GET", "/adapters/less"))[0] == 404


async def test_a_text_that_is_too_short_is_told_what_would_help(api: Api) -> None:
    _, job = await learn(api, "short", steps=1, text="A short text.", generator="none")
    assert (job["state"], job["error"]["code"]) == ("failed", "empty_corpus")
    assert job["error"]["message"].endswith("give questions, or a longer document")


async def test_too_few_questions_that_an_earlier_version_accepted(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coserve.api.documents.submission.least_questions", lambda _: 2)
    _, job = await learn(api, "few", **RECIPES["own questions"], publish="if_learned")
    assert job["error"]["code"] == "empty_corpus"
    assert job["error"]["message"].startswith("2 of the 2 questions given have an answer: expected 4 at least")


@pytest.mark.parametrize(
    ("status", "code", "field", "changes"),
    [
        (400, "invalid_request", "data", {"data": [{"text": "x"}]}),
        (400, "invalid_request", "training.train_on", {"training": {"train_on": "all"}}),
        (400, "invalid_request", "document", {"document": {}}),
        (400, "invalid_request", "document.chunk_tokens", {"document": {"text": "x", "chunk_tokens": 1000}}),
        (400, "invalid_request", "document.overlap_tokens", {"document": {"text": "x", "overlap_tokens": 600}}),
        (400, "invalid_request", "document.recipe", {"document": {"text": "x", "recipe": "magic"}}),
        (
            400,
            "invalid_request",
            "document.questions",
            {"document": {"text": "x", "questions": [{"question": each} for each in ("Why?", "why", "How?", "Who?")]}},
        ),
        (400, "invalid_request", "document.instruction", {"document": {"text": "x", "instruction": "So " * 2000}}),
        (400, "invalid_request", "document.prefix_tokens", {"document": {"text": "x", "prefix_tokens": 9}}),
        (
            400,
            "invalid_request",
            "document.questions[1].question",
            {"document": {"text": "x", "questions": [{"question": each} for each in ("Why?", " ?", "How?", "Who?")]}},
        ),
        (400, "invalid_request", "document.lm_weight", {"document": {"text": "x", "recipe": "lm", "lm_weight": 0}}),
        (400, "invalid_request", "document.holdout", {"document": {"recipe": "lm", "holdout": 0.5, **ASKED}}),
        (400, "invalid_request", "document.questions_per_chunk", {"document": {"questions_per_chunk": 3, **ASKED}}),
        (400, "invalid_request", "document.temperature", {"document": {"temperature": 0, **ASKED}}),
        (400, "invalid_request", "document.questions", {"document": {"generator": "none", **ASKED}}),
        (400, "invalid_request", "document.instruction", {"document": {"generator": "none", "instruction": ""}}),
        (
            400,
            "invalid_request",
            "document.generator",
            {
                "document": {
                    "generator": "adapter:a",
                    "questions": [{"question": each, "answer": "x"} for each in "abcd"],
                }
            },
        ),
        (
            400,
            "invalid_request",
            "document.questions[1]",
            {
                "document": {
                    "text": "x",
                    "publish": "always",
                    "questions": [{"question": "Why?"}, {"question": "How?", "answer": "So " * 2000}],
                }
            },
        ),
        (404, "adapter_not_found", "document.generator", {"document": {"text": "x", "generator": "adapter:missing"}}),
        (403, "forbidden_path", "path", {"document": {"path": "../secret"}}),
        (422, "empty_corpus", None, {"document": "  "}),
    ],
)
async def test_refusals(api: Api, status: int, code: str, field: str | None, changes: dict[str, Any]) -> None:
    got, body = await api.call("POST", "/finetune", json={"adapter": "refused", "document": TEXT, **changes})
    assert (got, body["error"]["code"], body["error"].get("field")) == (status, code, field), body


@pytest.mark.slow
async def test_the_sdk_and_the_command_line_learn_files(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file goes as it is; several files, or a folder's, are one document."""
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text(TEXT)
    url = api.url
    async with AsyncClient(url) as client:
        job = await client.learn("file", file=tmp_path / "a.txt", answer_tokens=4, training=ONE, **ASKED)
        with pytest.raises(NotLearned):
            await job.wait()
        assert job.info.document is not None
        assert job.info.document.tokens > 20
        for several in (tmp_path, [tmp_path / "a.txt", str(tmp_path / "b.md")]):
            both = (await client.learn("folder", file=several, **ASKED)).info
            assert both.document is not None
            assert both.document.tokens > 2 * job.info.document.tokens - 2
            await (await client.job(both.id)).cancel()
        with pytest.raises(InvalidRequest, match="got none"):
            await client.learn("file", file=[])
        with pytest.raises(InvalidRequest, match="nothing there"):
            await client.learn("file", file=tmp_path / "missing.txt")
        with pytest.raises(InvalidRequest, match="one of text"):
            await client.learn("file")
        with pytest.raises(InvalidRequest, match="base, none or adapter:NAME"):
            await client.learn("file", "text", generator="model")
        with pytest.raises(InvalidRequest, match=r"^document\.questions\[0\]: expected an object, got a string"):
            await client.learn("file", "text", questions=["Why?"])  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="recipe"):
            await client.learn("file", "text", recipe="magic")  # type: ignore[arg-type]
    given = ["learn", "two", str(tmp_path)]
    given += ["--set", "document.answer_tokens=4", "--set", "document.publish=always", "--set", "training.steps=1"]
    given += ["--set", f"document.questions={json.dumps(ASKED['questions'])}"]
    assert await asyncio.to_thread(run, [*given, "--url", url]) == 0
    shown = capsys.readouterr()
    phases = re.findall(r"^two@1  (\w+): ", shown.err, re.MULTILINE)
    assert [phase for phase, _ in groupby(phases)] == ["chunks", "answers", "training", "evaluation"]
    assert "succeeded" in shown.out
    assert "in context" in shown.out
    assert f"note: files of {tmp_path} (2): a.txt, b.md\n" in shown.err
    assert await asyncio.to_thread(run, [*given, "--questions-per-chunk", "2", "--url", url]) == 1
    assert "document.questions_per_chunk: expected it left out" in capsys.readouterr().err
    (tmp_path / "none.tsv").write_text("\n")
    assert await asyncio.to_thread(run, [*given[:3], "--questions", str(tmp_path / "none.tsv"), "--url", url]) == 2
    assert "no question in" in capsys.readouterr().err
    _, page = await api.call("GET", "/finetune")
    notes = next(job["notes"] for job in page["data"] if job["adapter"] == "two")
    assert notes and f"note: {notes[-1]}\n" in shown.err
