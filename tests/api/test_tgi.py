"""`/generate` and `/generate_stream` in the words of LoRAX and TGI: what test_tgi_clients.py does not show."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coserve.core.link.generation import Generate, Tokens
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.types import FinishReason
from tests.support.api_server import REPLY, Api, read_events, serve_api, tokenizer
from tests.support.fake_engine import FakeEngine

PROMPT = "hello there"


async def ask(api: Api, **parameters: Any) -> dict[str, Any]:
    return await api.answered(200, "POST", "/generate", json={"inputs": PROMPT, "parameters": parameters})


async def streamed(api: Api, path: str = "/generate_stream", **body: Any) -> list[dict[str, Any]]:
    async with api.http.post(path, json={"inputs": PROMPT} | body) as response:
        assert response.status == 200
        return [event["data"] for event in read_events(await response.text())]


async def test_sampling(api: Api) -> None:
    await ask(api, do_sample=True)
    assert (await api.last_request()).sampling.temperature == 1.0
    await ask(api, do_sample=True, temperature=0)
    assert (await api.last_request()).sampling.temperature == 0.0
    await ask(api, top_k=3, top_p=0.5, repetition_penalty=1.2, ignore_eos_token=True, max_new_tokens=4, seed=9)
    params = (await api.last_request()).sampling
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (1.0, 3, 0.5, 1.2)
    assert (params.ignore_eos, params.max_tokens, params.seed) == (True, 4, 9)


@pytest.mark.parametrize(
    "parameters",
    [
        {"grammar": {"type": "json", "value": {"type": "object"}}},
        {"grammar": {"type": "json", "value": '{"type": "object"}'}},
        {"grammar": {"type": "json_schema", "value": {"name": "x", "schema": {"type": "object"}}}},
        {"grammar": {"type": "regex", "value": "a+"}},
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        {"response_format": {"type": "json_object"}},
    ],
    ids=str,
)
async def test_a_grammar_reaches_the_engine(api: Api, parameters: dict[str, Any]) -> None:
    await ask(api, **parameters)
    grammar = (await api.last_request()).grammar
    assert grammar is not None and ("a+" in str(grammar)) is (parameters.get("grammar", {}).get("type") == "regex")


@pytest.mark.parametrize("text", [False, True])
async def test_a_schema_of_properties_is_an_object(api: Api, text: bool) -> None:
    """As Outlines reads it, and TGI's documentation writes it; in JSON Schema, it allows a number, too."""
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    given: Any = json.dumps(schema) if text else schema
    for parameters in (
        {"grammar": {"type": "json", "value": given}},
        {"response_format": {"type": "json_object", "schema": given}},
    ):
        await ask(api, **parameters)
        found = (await api.last_request()).grammar
        await ask(api, grammar={"type": "json", "value": {"type": "object"} | schema})
        assert found == (await api.last_request()).grammar is not None


async def test_an_error_of_a_schema_names_what_may_have_it(api: Api) -> None:
    format = {"type": "json_object", "schema": {"type": "nonsense"}}
    status, body = await api.call("POST", "/", json={"inputs": "x", "parameters": {"response_format": format}})
    assert status == 422 and body["error"].startswith("grammar or response_format: expected a JSON schema")


async def test_a_long_prompt_is_cut(api: Api) -> None:
    await ask(api)
    whole = (await api.last_request()).prompt
    await ask(api, truncate=1)
    assert (await api.last_request()).prompt[-1:] == whole[-1:] and len(whole) > 1
    assert len((await api.last_request()).prompt) < len(whole)


async def test_how_it_ends(api: Api) -> None:
    stopped = await ask(api, stop=["sat"], details=True)
    assert (stopped["generated_text"], stopped["details"]["finish_reason"]) == ("the cat sat", "stop_sequence")
    api.reply = [*api.reply[:1], 0]
    ended = await ask(api, details=True)
    assert (ended["generated_text"], ended["details"]["finish_reason"]) == ("the", "eos_token")
    assert ended["details"]["tokens"][-1] | {"logprob": 0} == {
        "id": 0,
        "text": tokenizer().vocabulary.name(0),
        "logprob": 0,
        "special": True,
    }


async def test_streams(api: Api) -> None:
    for events in (
        await streamed(api, parameters={"details": True}),
        await streamed(api, "/generate", parameters={"details": True}, stream=True),
    ):
        *others, last = events
        assert "".join(event["token"]["text"] for event in events) == REPLY
        assert [event["index"] for event in events] == list(range(1, len(api.reply) + 1))
        assert all(event["generated_text"] is event["details"] is None for event in others)
        assert last["generated_text"] == REPLY
        assert (last["details"]["finish_reason"], last["details"]["generated_tokens"]) == ("length", len(api.reply))


async def test_a_stream_keeps_text_that_was_held_back(api: Api) -> None:
    api.reply = [*api.reply[:2], 0]
    events = await streamed(api, parameters={"stop": ["cat"]})  # "c" could become it
    text = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
    assert text == events[-1]["generated_text"] == "the c"


@pytest.mark.parametrize(
    "parameters",
    [
        {"adapter_source": "hub"},
        {"merged_adapters": {"ids": ["a"]}},
        {"api_token": "x"},
        {"best_of": 2},
        {"typical_p": 0.5},
        {"watermark": True},
        {"truncate": 0},
        {"grammar": {"type": "regex", "value": {}}},
        {"grammar": {"type": "regex", "value": "("}},
        {"grammar": {"type": "json_schema", "value": {"type": "object"}}},
        {"grammar": {"type": "json", "value": {}}, "response_format": {"type": "json_object"}},
        {"schema": {"type": "object"}},
        {"best_of": 2, "do_sample": True, "seed": 1},
        {"top_n_tokens": 21},
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"nonsense": 1},
        {"adapter_id": "../x"},
    ],
    ids=str,
)
async def test_what_is_not_supported_is_refused_by_name(api: Api, parameters: dict[str, Any]) -> None:
    for path in ("/", "/generate", "/generate_stream"):
        status, body = await api.call("POST", path, json={"inputs": "x", "parameters": parameters})
        assert (status, body["error_type"]) == (422, "validation"), body
        assert isinstance(body["error"], str)
        await api.works()


async def test_other_errors(api: Api) -> None:
    status, body = await api.call("POST", "/generate", json={"inputs": "x", "parameters": {"adapter_id": "nobody"}})
    assert (status, body["error_type"]) == (404, "validation")
    for body, said in (
        ({"inputs": ""}, "inputs: expected a prompt"),
        ({"inputs": "word " * 1000}, "inputs: expected at most"),
        ({"inputs": 5}, "inputs: expected a string"),
        ({"inputs": "x", "parameters": {"seed": -1}}, "seed: expected an integer >= 0"),
        ({"inputs": "x", "parameters": {"max_new_tokens": 1000}}, "max_new_tokens: expected at most the context"),
    ):
        for path in ("/", "/generate", "/generate_stream"):
            status, refused = await api.call("POST", path, json=body)
            assert (status, refused["error_type"]) == (422, "validation")
            assert refused["error"].startswith(said)
    api.engine.go_requests.clear()
    waiting = asyncio.create_task(api.call("POST", "/generate", json={"prompt": "x", "n": 4}))
    await api.engine.saw(Generate, 4)
    status, body = await api.call("POST", "/generate_stream", json={"inputs": "x"})
    assert (status, body["error_type"]) == (429, "overloaded")
    api.engine.go_requests.set()
    await waiting


class UnequalEngine(FakeEngine):
    """Its choices' tokens have other log-probabilities: choice 1 is the likeliest, 0 the least."""

    async def answer(self, request: Generate) -> None:
        choice = [message.id for message in self.heard(Generate)].index(request.id)
        token, logprob = list(self.reply(request))[choice], (-3.0, -0.5, -1.0)[choice]
        packed = PackedLogprobs.of([TokenLogprob(logprob, ((token, logprob),))])
        self.link.send(Tokens(id=request.id, tokens=(token,), logprobs=packed, finished=FinishReason.LENGTH))


async def test_the_best_of_several_has_the_largest_mean_logprob(tmp_path: Path) -> None:
    async with serve_api(tmp_path, engine_type=UnequalEngine) as api:
        answer = await ask(api, best_of=3, do_sample=True, details=True)
    details = answer["details"]
    assert [token["logprob"] for token in details["tokens"]] == [-0.5]
    assert answer["generated_text"] == details["tokens"][0]["text"]
    assert [one["tokens"][0]["logprob"] for one in details["best_of_sequences"]] == [-1.0, -3.0]
