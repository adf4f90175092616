"""What `POST /generate` says of a prompt: its log-probabilities and token ids, over a fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coserve.core.link.generation import Generate
from tests.support.api_server import REPLY, Api, read_events, serve_api, tokenizer

IDS = tokenizer().encode("hello there")


async def ask(api: Api, **body: Any) -> dict[str, Any]:
    return await api.answered(200, "POST", "/generate", json={"prompt": IDS, **body})


async def test_a_prompt_is_scored_beside_its_answer(api: Api) -> None:
    answer = await ask(api, prompt_logprobs=1, return_prompt_ids=True, n=2)
    assert answer["prompt_token_ids"] == IDS
    assert [entry["token_id"] for entry in answer["prompt_logprobs"]] == IDS
    assert "".join(entry["token"] for entry in answer["prompt_logprobs"]) == "hello there"
    first, *others = answer["prompt_logprobs"]
    assert (first["logprob"], first["top"]) == (None, [])
    assert all(entry["logprob"] == -0.25 for entry in others)
    assert others[0]["top"] == [{"token_id": IDS[1], "token": tokenizer().vocabulary.name(IDS[1]), "logprob": -0.25}]
    assert [choice["text"] for choice in answer["choices"]] == [REPLY, REPLY]
    sent = await api.engine.saw(Generate, 2)
    assert [m.sampling.prompt_logprobs for m in sent if isinstance(m, Generate)] == [1, None]  # once is enough


async def test_a_prompt_is_scored_alone(api: Api) -> None:
    answer = await ask(api, prompt_logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [], "length")
    assert len(answer["prompt_logprobs"]) == len(IDS)
    counts = {"prompt_tokens": len(IDS), "completion_tokens": 0, "total_tokens": len(IDS)}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


async def test_a_prompt_of_one_token_has_one_entry(api: Api) -> None:
    for max_tokens in (0, 1):
        answer = await ask(api, prompt=IDS[:1], prompt_logprobs=0, max_tokens=max_tokens)
        assert [entry["logprob"] for entry in answer["prompt_logprobs"]] == [None]


async def test_in_a_stream_the_prompt_comes_first(api: Api) -> None:
    body = {"prompt": IDS, "prompt_logprobs": 0, "return_prompt_ids": True, "stream": True}
    async with api.http.post("/generate", json=body) as response:
        chunks = [event["data"] for event in read_events(await response.text())][:-1]
    assert [chunk["prompt_token_ids"] for chunk in chunks if chunk["prompt_token_ids"]] == [IDS]
    assert [bool(chunk["token_ids"]) for chunk in chunks] == sorted(bool(chunk["token_ids"]) for chunk in chunks)
    assert sum(len(chunk["prompt_logprobs"] or []) for chunk in chunks) == len(IDS)


async def test_as_many_tokens_as_fit(api: Api) -> None:
    await ask(api, max_tokens=None)
    (sent,) = await api.engine.saw(Generate)
    assert isinstance(sent, Generate)
    assert sent.sampling.max_tokens == api.base.context - len(IDS)


async def test_what_ends_a_text_can_be_part_of_it(api: Api) -> None:
    answer = await ask(api, stop=["sat"], include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "the cat sat"
    answer = await ask(api, stop_token_ids=[api.reply[1]], include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "the c"
    answer = await ask(api, stop_token_ids=[api.reply[1]])
    assert answer["choices"][0]["text"] == "the"


async def test_special_tokens_are_text_if_wanted(api: Api) -> None:
    api.reply = [*api.reply[:1], 0]
    special = tokenizer().vocabulary.name(0)
    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert (await ask(api, **shown))["choices"][0]["text"] == "the" + special
    assert (await ask(api))["choices"][0]["text"] == "the"


async def test_scores_in_flight_are_bounded(tmp_path: Path) -> None:
    body = {"prompt": IDS, "prompt_logprobs": 1}
    async with serve_api(tmp_path / "data", max_prompt_scores=2 * len(IDS)) as api:
        for _ in range(3):  # what one held is free again
            await ask(api, **body)
        await api.refused(429, "queue_full", "POST", "/generate", json=body | {"prompt_logprobs": 2})
        await api.refused(400, "invalid_request", "POST", "/generate", json={"prompt": IDS, "max_tokens": 0})
