"""OpenAI's files and fine-tuning jobs by its own client, over a real engine: one daemon for all tests."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.support.api_server import Api
from tests.support.real_server import serve_real

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.fine_tuning import FineTuningJob

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.asyncio(loop_scope="module")

TURN = {"role": "user", "content": "Say hello."}
CHATS = [{"messages": [TURN, {"role": "assistant", "content": f"Ahoy number {n}!"}]} for n in range(8)]
PAIRS = [
    {
        "input": {"messages": [TURN], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": f"Ahoy {n}!"}],
        "non_preferred_output": [{"role": "assistant", "content": f"Hello {n}."}],
    }
    for n in range(4)
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    async with serve_real(tmp_path_factory.mktemp("openai") / "data", max_body_bytes=1 << 20) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: Api) -> AsyncIterator[AsyncOpenAI]:
    async with api.openai() as client:
        yield client


async def upload(client: AsyncOpenAI, rows: list[Any], name: str = "rows.jsonl") -> str:
    content = "\n".join(map(json.dumps, rows)).encode()
    return (await client.files.create(file=(name, content), purpose="fine-tune")).id


async def finished(api: Api, client: AsyncOpenAI, id: str) -> FineTuningJob:
    await api.job_until(id, "succeeded")
    return await client.fine_tuning.jobs.retrieve(id)


async def test_the_whole_life_of_a_job(api: Api, client: AsyncOpenAI) -> None:
    rows, held = await upload(client, CHATS), await upload(client, CHATS[:2])
    method: Any = {
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": "auto"}},
    }
    made = await client.fine_tuning.jobs.create(
        model="bundled",
        training_file=rows,
        validation_file=held,
        method=method,
        suffix="my pirate",
        seed=7,
        metadata={"run": "1"},
        extra_body={"lora": {"r": 2}},
    )
    assert (made.status, made.fine_tuned_model, made.training_file, made.validation_file) == (
        "queued",
        None,
        rows,
        held,
    )
    assert (made.seed, made.metadata, made.model, made.organization_id) == (7, {"run": "1"}, "bundled", "coserve")
    done = await finished(api, client, made.id)
    name = done.fine_tuned_model
    assert name is not None
    assert name.startswith("ft:bundled:coserve:my-pirate:")
    assert done.status == "succeeded"
    assert done.trained_tokens
    hyperparameters = done.hyperparameters
    assert (hyperparameters.n_epochs, hyperparameters.batch_size) == (2, 4)
    assert hyperparameters.learning_rate_multiplier == 1

    turns: list[Any] = [TURN]
    chat = await client.chat.completions.create(model=name, messages=turns, max_completion_tokens=4)
    assert chat.model == name
    assert name in [model.id async for model in client.models.list()]
    assert (await client.models.retrieve(name)).id == name

    status, native = await api.call("GET", f"/finetune/{made.id}")
    assert (status, native["state"], native["training"]["validation_rows"]) == (200, "succeeded", 2)
    assert native["rows"] == len(CHATS) + 2

    (checkpoint,) = [each async for each in client.fine_tuning.jobs.checkpoints.list(made.id)]
    assert (checkpoint.fine_tuned_model_checkpoint, checkpoint.step_number) == (name, native["total_steps"])
    assert checkpoint.metrics.full_valid_loss is not None
    events = [each async for each in client.fine_tuning.jobs.list_events(made.id, limit=2)]
    assert len({each.id for each in events}) == len(events) > 2
    assert sum(each.type == "metrics" for each in events) == native["total_steps"]
    assert events[0].message.startswith("published")

    (result,) = done.result_files
    table = (await client.files.content(result)).text
    steps = list(csv.DictReader(table.splitlines()))
    assert [int(step["step"]) for step in steps] == list(range(1, native["total_steps"] + 1))
    assert float(steps[-1]["train_loss"]) == pytest.approx(native["loss"], rel=1e-4)
    assert steps[-1]["valid_loss"] and 0 <= float(steps[-1]["train_accuracy"]) <= 1
    shown = await client.files.retrieve(result)
    assert (shown.purpose, shown.bytes) == ("fine-tune-results", len(table))
    for purpose in (openai.omit, "fine-tune-results"):
        assert shown in [file async for file in client.files.list(purpose=purpose, limit=1)]
    assert shown.purpose not in [file.purpose async for file in client.files.list(purpose="fine-tune")]
    assert [file async for file in client.files.list(order="asc", after=result)] == []
    with pytest.raises(openai.BadRequestError, match="deleted with their job"):
        await client.files.delete(result)
    with pytest.raises(openai.NotFoundError):
        await client.files.content("file-job-0")

    further = await client.fine_tuning.jobs.create(model=name, training_file=rows, hyperparameters={"n_epochs": 1})
    again = await finished(api, client, further.id)
    assert again.model == name
    assert again.fine_tuned_model != name
    assert (await client.models.delete(name)).deleted
    assert [each async for each in client.fine_tuning.jobs.checkpoints.list(made.id)] == []
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model=name, messages=turns)
    with pytest.raises(openai.BadRequestError):
        await client.models.delete("bundled")


async def test_jobs_are_listed_by_their_metadata(client: AsyncOpenAI) -> None:
    file, made = await upload(client, PAIRS), dict[str, str]()
    asked: Any = {"model": "bundled", "training_file": file, "method": {"type": "dpo"}}
    for team, metadata in (("a", {"squad": "a", "run": "1"}), ("b", {"squad": "b"}), ("", None)):
        made[team] = (await client.fine_tuning.jobs.create(**asked, metadata=metadata)).id
    for wanted, found in (({"squad": "a"}, [made["a"]]), ({"squad": "a", "run": "2"}, []), ({"squa": "a"}, [])):
        assert [job.id async for job in client.fine_tuning.jobs.list(limit=1, metadata=wanted)] == found
    without = [job.id async for job in client.fine_tuning.jobs.list(extra_query={"metadata": "null"})]
    assert made[""] in without and not {made["a"], made["b"]} & set(without)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.fine_tuning.jobs.list(extra_query={"metadata": "a"})
    assert caught.value.param == "metadata"


async def test_preferences_and_a_native_job(api: Api, client: AsyncOpenAI) -> None:
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 1}}}
    made = await client.fine_tuning.jobs.create(
        model="bundled", training_file=await upload(client, PAIRS), method=method
    )
    done = await finished(api, client, made.id)
    assert done.method is not None
    assert done.method.type == "dpo"
    assert done.method.dpo is not None
    assert done.method.dpo.hyperparameters is not None
    assert done.method.dpo.hyperparameters.beta == 0.2
    body = {"adapter": "poet", "data": [{"text": "Once upon a time."}], "training": {"steps": 1}, "lora": {"r": 2}}
    native = await api.answered(202, "POST", "/finetune", json=body)
    poet = await finished(api, client, native["id"])
    assert (poet.fine_tuned_model, poet.training_file) == ("poet@1", "")
    pairs = {"data": PAIRS, "training": {"steps": 1, "loss": {"type": "simpo"}}}
    simpo = await api.answered(202, "POST", "/finetune", json=body | pairs)
    assert (await client.fine_tuning.jobs.retrieve(simpo["id"])).method is None, "OpenAI has no such method"
    await api.job_until(simpo["id"], "succeeded")
    listed = [job.id async for job in client.fine_tuning.jobs.list(limit=1)]
    assert listed[:3] == [simpo["id"], native["id"], made.id]
    with pytest.raises(openai.NotFoundError) as caught:
        await client.fine_tuning.jobs.list(after="job-0")
    assert caught.value.param == "after"


async def test_pause_resume_and_cancel(api: Api, client: AsyncOpenAI) -> None:
    jobs = client.fine_tuning.jobs
    made = await jobs.create(
        model="bundled", training_file=await upload(client, CHATS), hyperparameters={"n_epochs": 1000}
    )
    assert (await jobs.pause(made.id)).status == "paused"
    assert (await jobs.resume(made.id)).status in ("queued", "running")
    ended = await jobs.cancel(made.id)
    assert (ended.status, ended.fine_tuned_model) == ("cancelled", None)
    assert [each async for each in jobs.checkpoints.list(made.id)] == []
    with pytest.raises(openai.ConflictError):
        await jobs.cancel(made.id)


async def test_files(api: Api, client: AsyncOpenAI) -> None:
    before = [each.id async for each in client.files.list()]
    first, second = await upload(client, CHATS, "a.jsonl"), await upload(client, PAIRS, "b.jsonl")
    found = await client.files.retrieve(first)
    content = (await client.files.content(first)).content
    assert (found.filename, found.purpose, found.bytes) == ("a.jsonl", "fine-tune", len(content))
    assert [json.loads(line) for line in content.splitlines()] == CHATS
    assert [each.id async for each in client.files.list(limit=1)] == [second, first, *before]
    oldest = await client.files.list(order="asc", purpose="fine-tune", limit=10_000)
    uploaded = [id for id in reversed(before) if not id.startswith("file-job-")]
    assert [each.id for each in oldest.data] == [*uploaded, first, second]
    assert (await client.files.delete(first)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(first)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.files.list(after=first)
    assert caught.value.param == "after"
    shutil.rmtree(api.service.folder.files / second)  # as a deletion that has begun
    with pytest.raises(openai.NotFoundError):
        await client.files.content(second)


async def test_more_than_a_hundred_files_are_one_page(api: Api, client: AsyncOpenAI, tmp_path: Path) -> None:
    """Clients that delete all files read one page."""
    for number in range(101):
        (tmp_path / str(number)).write_bytes(b"{}")
        api.service.files.add(tmp_path / str(number), f"{number}.jsonl", "batch")
    page = await client.files.list(purpose="batch")
    assert (len(page.data), page.has_more) == (101, False)
    for file in page.data:
        api.service.files.remove(file.id)


async def test_refusals_have_openais_shape(api: Api, client: AsyncOpenAI) -> None:
    jobs, rows = client.fine_tuning.jobs, await upload(client, CHATS)
    wrong = await upload(client, [*CHATS, {"messages": []}])
    batch = (await client.files.create(file=b"{}", purpose="batch")).id
    dpo: Any = {"type": "dpo", "supervised": {"hyperparameters": {"n_epochs": 1}}}
    tracker: Any = [{"type": "wandb", "wandb": {"project": "x"}}]
    for fields, error, param in (
        ({"training_file": "file-0"}, openai.BadRequestError, "training_file"),
        ({"training_file": batch}, openai.BadRequestError, "training_file"),
        ({"model": "nobody", "training_file": rows}, openai.NotFoundError, "model"),
        ({"model": "ft:bundled:coserve::01234567", "training_file": rows}, openai.NotFoundError, "model"),
        ({"training_file": rows, "integrations": tracker}, openai.BadRequestError, "integrations"),
        ({"training_file": rows, "method": dpo}, openai.BadRequestError, "method.supervised"),
        (
            {"training_file": rows, "hyperparameters": {"n_epochs": 0}},
            openai.BadRequestError,
            "hyperparameters.n_epochs",
        ),
    ):
        with pytest.raises(error) as caught:
            await jobs.create(**{"model": "bundled", **fields})
        assert caught.value.param == param, caught.value
    for files, said in (
        ({"training_file": wrong}, "training_file: line 9:"),
        ({"training_file": rows, "validation_file": wrong}, "validation_file: line 9:"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=said):
            await jobs.create(model="bundled", **files)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.files.create(file=b"{}", purpose="vision")
    assert caught.value.param == "purpose"
    day: Any = {"anchor": "created_at", "seconds": 86400}
    with pytest.raises(openai.BadRequestError, match="kept until they are deleted"):
        await client.files.create(file=b"{}", purpose="fine-tune", expires_after=day)
    with pytest.raises(openai.APIStatusError) as caught:
        await client.files.create(file=b"x" * (1 << 20), purpose="fine-tune")
    assert caught.value.status_code == 413


async def test_a_repeated_request_is_one_job(api: Api, client: AsyncOpenAI) -> None:
    rows = await upload(client, CHATS)

    async def create() -> str:
        made = await client.fine_tuning.jobs.create(
            model="bundled", training_file=rows, hyperparameters={"n_epochs": 1}, extra_headers={"Idempotency-Key": "k"}
        )
        return made.id

    first = await create()
    assert await create() == first
    await finished(api, client, first)
