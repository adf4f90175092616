"""The real `openai` client against the API over a fake engine: what it reads, and what it raises."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coserve.core.limits import MAX_SEED
from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.types import AdapterRef
from tests.support.api_server import REPLY, Api, tokenizer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

openai = pytest.importorskip("openai")

PROMPT = "hello there"
IDS = tokenizer().encode(PROMPT)
from tests.support.api_server import add_adapter


async def test_a_completion(api: Api, client: AsyncOpenAI) -> None:
    done = await client.completions.create(model="fake", prompt=PROMPT, seed=3, user="me", temperature=0.5)
    assert (done.object, done.model) == ("text_completion", "fake")
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (REPLY, "length", None)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(IDS), len(api.reply))
    params = (await api.last_request()).sampling
    assert (params.max_tokens, params.temperature, params.seed) == (16, 0.5, 3)


async def test_prompts_in_every_form(api: Api, client: AsyncOpenAI) -> None:
    for prompt, count in ((PROMPT, 1), ([PROMPT, "x"], 2), (IDS, 1), ([IDS, [5]], 2)):
        done = await client.completions.create(model="fake", prompt=prompt, n=2)
        assert [choice.index for choice in done.choices] == list(range(2 * count))
        assert {choice.text for choice in done.choices} == {REPLY}
        assert done.usage is not None
        assert done.usage.completion_tokens == 2 * count * len(api.reply)
    sent = [message.prompt for message in await api.engine.saw(Generate)]
    assert set(sent[-4:]) == {tuple(IDS), (5,)}  # nothing is put before token ids


async def test_a_streamed_completion(client: AsyncOpenAI, api: Api) -> None:
    stream = await client.completions.create(
        model="fake", prompt=[PROMPT, "x"], stream=True, stream_options={"include_usage": True}
    )
    texts, ends, usages = ["", ""], {}, []
    async for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [REPLY, REPLY]
    assert ends == {0: "length", 1: "length"}
    *others, last = usages
    assert others == [None] * len(others)
    assert last is not None
    assert last.completion_tokens == 2 * len(api.reply)


async def test_usage_so_far(client: AsyncOpenAI, api: Api) -> None:
    extra = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    stream = await client.completions.create(model="fake", prompt=PROMPT, stream=True, extra_body=extra)
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts[:-1] == sorted(set(counts))  # tokens that pile up come in one chunk
    assert counts[-2:] == [len(api.reply), len(api.reply)]


async def test_an_echo_with_logprobs(client: AsyncOpenAI, api: Api) -> None:
    done = await client.completions.create(model="fake", prompt=IDS, echo=True, logprobs=1, max_tokens=1)
    (choice,) = done.choices
    first = tokenizer().vocabulary.name(api.reply[0])
    assert choice.text == PROMPT + first
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*map(tokenizer().vocabulary.name, IDS), first]
    assert choice.logprobs.token_logprobs == [None, *[-0.25] * (len(IDS) - 1), -0.5]
    assert choice.logprobs.text_offset == [
        len("".join(choice.logprobs.tokens[:i])) for i in range(len(choice.logprobs.tokens))
    ]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    assert all(len(top) == 1 for top in choice.logprobs.top_logprobs[1:])


async def test_an_echo_alone_and_a_score_alone(client: AsyncOpenAI) -> None:
    done = await client.completions.create(model="fake", prompt=PROMPT, echo=True)
    assert done.choices[0].text == PROMPT + REPLY
    done = await client.completions.create(model="fake", prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
    assert done.choices[0].text == PROMPT
    assert done.choices[0].logprobs is not None
    assert len(done.choices[0].logprobs.tokens or []) == len(IDS)
    done = await client.completions.create(model="fake", prompt=PROMPT, echo=True, max_tokens=0)
    assert (done.choices[0].text, done.choices[0].logprobs) == (PROMPT, None)


async def test_an_echo_streamed_is_the_same(client: AsyncOpenAI) -> None:
    whole = (await client.completions.create(model="fake", prompt=IDS, echo=True, logprobs=1)).choices[0]
    stream = await client.completions.create(model="fake", prompt=IDS, echo=True, logprobs=1, stream=True)
    choices = [choice async for chunk in stream for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [entry for choice in choices if choice.logprobs for entry in getattr(choice.logprobs, name)]
        assert parts == getattr(whole.logprobs, name), name


async def test_a_chat(client: AsyncOpenAI, api: Api) -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    done = await client.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}],  # type: ignore[list-item,misc]
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=1,
        store=False,
        metadata={"a": "b"},
    )
    (choice,) = done.choices
    assert (done.object, choice.message.role, choice.message.content) == ("chat.completion", "assistant", REPLY)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == [tokenizer().vocabulary.name(id) for id in api.reply]
    assert all(bytes(entry.bytes or []).decode() == entry.token for entry in choice.logprobs.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)
    (sent,) = await api.engine.saw(Generate)
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi\nthere"}]
    assert sent.prompt == tuple(tokenizer().chat(turns))


async def test_a_streamed_chat(client: AsyncOpenAI, api: Api) -> None:
    stream = await client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, roles, ends = ["", ""], [], []
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles.append((choice.index, choice.delta.role))
            if choice.finish_reason:
                ends.append(choice.finish_reason)
    assert texts == [REPLY, REPLY]
    assert sorted(roles) == [(0, "assistant"), (1, "assistant")]
    assert ends == ["length", "length"]
    assert usage is not None
    assert usage.completion_tokens == 2 * len(api.reply)


async def test_a_chat_may_be_as_long_as_fits(client: AsyncOpenAI, api: Api) -> None:
    await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
    (sent,) = await api.engine.saw(Generate)
    assert sent.sampling.max_tokens == api.base.context - len(sent.prompt)


async def test_further_parameters_reach_the_engine(client: AsyncOpenAI, api: Api) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    done = await client.completions.create(model="fake", prompt=IDS, stop="sat", extra_body=extra)
    params = (await api.last_request()).sampling
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.1)
    assert (params.stop_token_ids, params.ignore_eos, params.min_tokens) == ((7,), True, 2)
    choice = done.choices[0].model_dump()
    assert choice["text"] == "the cat sat"
    assert (choice["prompt_token_ids"], choice["stop_reason"], choice["finish_reason"]) == (IDS, "sat", "stop")
    assert choice["token_ids"] == api.reply[: len(choice["token_ids"])]
    await client.completions.create(model="fake", prompt=IDS, extra_body={"cache_salt": "tenant"})
    salts = [m.cache_salt for m in await api.engine.saw(Generate)]
    assert [salt.rpartition("\x1f")[2] for salt in salts] == ["", "tenant"]  # the project's name comes before
    await client.completions.create(model="fake", prompt=IDS, extra_body={"top_k": -1, "seed": -1, "best_of": 1})
    assert (await api.last_request()).sampling.top_k == 0


async def test_models(client: AsyncOpenAI, api: Api) -> None:
    add_adapter(api, "poet")
    add_adapter(api, "poet", 2)
    add_adapter(api, "stranger", fingerprint="other")
    base, poet = [model.model_dump() async for model in client.models.list()]
    assert (base["id"], base["parent"], base["max_model_len"]) == ("fake", None, api.base.context)
    assert (poet["id"], poet["root"], poet["parent"], poet["created"]) == ("poet", "poet@2", "fake", 1002)
    assert (await client.models.retrieve("poet@1")).model_dump()["root"] == "poet@1"
    assert (await client.models.retrieve("fake")).id == "fake"
    for name in ("nobody", "poet@9", "org/model", "stranger", "a b"):
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve(name)
    for name, version in (("poet", 2), ("poet@1", 1)):
        done = await client.completions.create(model=name, prompt=PROMPT)
        assert done.model == name
        sent = await api.last_request()
        assert sent.adapter == AdapterRef("poet", version)


async def test_unknown_models(client: AsyncOpenAI) -> None:
    for name in ("gpt-4", "poet@1", "org/model", "x" * 300):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])
        assert (caught.value.code, caught.value.param, caught.value.type) == (
            "model_not_found",
            "model",
            "not_found_error",
        )


async def test_bad_prompts(client: AsyncOpenAI) -> None:
    bad: list[object] = [[], [[]], ["", "x"], ["x", 5], [5, [6]], [["x"]], "word " * 200, [4096], [-1]]
    for prompt in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="fake", prompt=prompt)  # type: ignore[call-overload]
        assert str(caught.value.param).startswith("prompt"), prompt


async def test_seeds_of_64_bits_as_openai_has_them(client: AsyncOpenAI, api: Api) -> None:
    for given, used in ((0, 0), (MAX_SEED, MAX_SEED), ((1 << 63) - 1, MAX_SEED), (1 << 62, 0), (-2, MAX_SEED - 1)):
        await client.completions.create(model="fake", prompt="x", seed=given)
        assert (await api.last_request()).sampling.seed == used
        await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}], seed=given)
        assert (await api.last_request()).sampling.seed == used


async def test_a_full_queue(client: AsyncOpenAI, api: Api) -> None:
    api.engine.go_requests.clear()
    waiting = asyncio.create_task(client.completions.create(model="fake", prompt="x"))
    await api.engine.saw(Generate)
    for create in (
        client.completions.create(model="fake", prompt=["x"] * 4),
        client.completions.create(model="fake", prompt="x", n=4),
    ):
        with pytest.raises(openai.RateLimitError) as caught:
            await create
        assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")
        assert caught.value.response.headers["Retry-After"] == "1"
    api.engine.go_requests.set()
    await waiting
    await api.works()  # nothing of them holds a place
    await client.completions.create(model="fake", prompt=["x"] * 4)


async def test_failures_in_the_engine(client: AsyncOpenAI, api: Api) -> None:
    api.engine.fail_requests = RequestFailed(id="", code="internal_error", message="at 0x7f00")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="fake", prompt=["x", "y"])
    assert (caught.value.message, caught.value.type) == ("Error code: 500 - internal error", "server_error")
    await api.engine.die()
    api.service.engine_lost()
    with pytest.raises(openai.APIStatusError) as stopped:
        await client.completions.create(model="fake", prompt="x")
    assert stopped.value.status_code == 503


async def test_a_stream_that_fails_says_so(client: AsyncOpenAI, api: Api) -> None:
    api.engine.stall_after = 2
    stream = await client.completions.create(model="fake", prompt="x", stream=True)
    given, text = tokenizer().decode(api.reply[:2]), ""
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            text += chunk.choices[0].text
            if text == given:
                await api.engine.die()
    assert caught.value.code == "engine_unavailable"
    assert text == given


async def test_log_probabilities_of_prompts(client: AsyncOpenAI) -> None:
    """In vLLM's format, which the client passes through."""
    name = tokenizer().vocabulary.name
    texts = await client.completions.create(
        model="fake", prompt=[IDS, IDS[:2]], n=2, extra_body={"prompt_logprobs": 1}, logprobs=0, echo=True
    )
    chat = await client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )
    shown = [(choice.model_extra or {})["prompt_logprobs"] for choice in texts.choices]
    whole, short = (
        [None, *({str(id): {"logprob": -0.25, "rank": 1, "decoded_token": name(id)}} for id in ids[1:])]
        for ids in (IDS, IDS[:2])
    )
    assert shown == [whole, whole, short, short]
    assert texts.choices[0].logprobs is not None
    assert texts.choices[0].logprobs.top_logprobs is not None
    found = chat.model_extra or {}
    ids = found["prompt_token_ids"]
    assert [None if entry is None else list(entry) for entry in found["prompt_logprobs"]] == [
        None,
        *([str(id)] for id in ids[1:]),
    ]
    assert chat.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="fake", prompt=IDS, stream=True, extra_body={"prompt_logprobs": 0})
    assert caught.value.param == "prompt_logprobs"
