"""The real clients of LoRAX and TGI against the API over a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.types import AdapterRef
from tests.support.api_server import REPLY, Api, add_adapter, tokenizer

WHY = "it asks for a huggingface_hub that transformers cannot use: `make venv` installs it without its dependencies"
lorax = pytest.importorskip("lorax", reason=WHY)
text_generation = pytest.importorskip("text_generation", reason=WHY)

# Both say `request.dict()`, which pydantic would have renamed.
pytestmark = pytest.mark.filterwarnings("ignore:The `dict` method is deprecated:DeprecationWarning")

PROMPT = "hello there"
IDS = tokenizer().encode(PROMPT)
BOTH = (lorax, text_generation)


@pytest.fixture
def url(api: Api) -> str:
    return api.url


async def generated(module: Any, url: str, **asked: Any) -> Any:
    return await module.AsyncClient(url, timeout=120).generate(PROMPT, **asked)


async def streamed(module: Any, url: str, **asked: Any) -> list[Any]:
    return [event async for event in module.AsyncClient(url, timeout=120).generate_stream(PROMPT, **asked)]


@pytest.mark.parametrize("module", BOTH, ids=lambda module: module.__name__)
class TestLoraxAndTextGeneration:
    """What both have. LoRAX's came from TGI's."""

    async def test_a_text(self, api: Api, url: str, module: Any) -> None:
        answer = await generated(module, url)
        assert answer.generated_text == REPLY
        assert answer.details.finish_reason == module.types.FinishReason.Length
        assert answer.details.generated_tokens == len(api.reply)
        assert answer.details.seed is None
        assert [token.id for token in answer.details.tokens] == api.reply
        assert "".join(token.text for token in answer.details.tokens) == REPLY
        assert (await api.last_request()).sampling.temperature == 0.0
        assert (await generated(module, url + "/", return_full_text=True)).generated_text == PROMPT + REPLY

    async def test_the_synchronous_client(self, api: Api, url: str, module: Any) -> None:
        def use() -> tuple[str, list[Any]]:
            client = module.Client(url, timeout=120)
            try:
                return client.generate(PROMPT).generated_text, list(client.generate_stream(PROMPT))
            finally:
                if getattr(client, "session", None) is not None:
                    client.session.close()

        text, events = await asyncio.to_thread(use)
        assert (text, events[-1].generated_text) == (REPLY, REPLY)
        assert [event.token.id for event in events] == api.reply

    async def test_sampling_and_details(self, api: Api, url: str, module: Any) -> None:
        answer = await generated(
            module,
            url,
            do_sample=True,
            seed=7,
            temperature=0.5,
            top_k=3,
            top_p=0.5,
            repetition_penalty=1.2,
            max_new_tokens=6,
            stop_sequences=["sat"],
            decoder_input_details=True,
        )
        assert answer.generated_text == "the cat sat"
        details = answer.details
        assert (details.finish_reason, details.seed) == (module.types.FinishReason.StopSequence, 7)
        assert [(token.id, token.logprob) for token in details.prefill] == [
            (id, -0.25 if place else None) for place, id in enumerate(IDS)
        ]
        params = (await api.last_request()).sampling
        assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 3, 0.5, 7)
        assert (params.repetition_penalty, params.max_tokens) == (1.2, 6)

    async def test_the_best_of_several(self, api: Api, url: str, module: Any) -> None:
        answer = await generated(module, url, do_sample=True, best_of=3)
        assert answer.generated_text == REPLY
        assert [other.generated_text for other in answer.details.best_of_sequences] == [REPLY, REPLY]
        assert len({answer.details.seed, *(other.seed for other in answer.details.best_of_sequences)}) == 3

    async def test_a_stream(self, api: Api, url: str, module: Any) -> None:
        *others, last = await streamed(module, url, do_sample=True, seed=3)
        events = [*others, last]
        assert "".join(event.token.text for event in events if not event.token.special) == REPLY
        assert [event.token.id for event in events] == api.reply
        assert all(event.generated_text is event.details is None for event in others)
        assert last.generated_text == REPLY
        assert (last.details.generated_tokens, last.details.seed) == (len(api.reply), 3)

    async def test_what_is_refused(self, api: Api, url: str, module: Any) -> None:
        for call in (generated, streamed):
            for asked in ({"watermark": True}, {"typical_p": 0.5}, {"max_new_tokens": 1 << 21}):
                with pytest.raises(module.errors.ValidationError) as caught:
                    await call(module, url, **asked)
                if "max_new_tokens" not in asked:
                    assert str(caught.value).startswith(f"{next(iter(asked))} is not supported")

    async def test_what_fails(self, api: Api, url: str, module: Any) -> None:
        api.engine.fail_requests = RequestFailed(id="", code="internal_error", message="at 0x7f00")
        for call in (generated, streamed):
            with pytest.raises(module.errors.GenerationError, match="internal error"):
                await call(module, url)

    async def test_a_stream_that_fails_says_so(self, api: Api, url: str, module: Any) -> None:
        api.engine.stall_after = 2
        reading = asyncio.create_task(streamed(module, url))
        await api.engine.saw(Generate)
        for _ in range(20):  # both tokens are said by then
            await asyncio.sleep(0)
        await api.engine.die()
        api.service.engine_lost()
        with pytest.raises(module.errors.GenerationError):
            await reading

    async def test_a_full_queue(self, api: Api, url: str, module: Any) -> None:
        api.engine.go_requests.clear()
        waiting = asyncio.create_task(api.call("POST", "/generate", json={"prompt": "x", "n": 4}))
        await api.engine.saw(Generate, 4)
        for call in (generated, streamed):
            with pytest.raises(module.errors.OverloadedError):
                await call(module, url)
        api.engine.go_requests.set()
        await waiting


class TestLorax:
    async def test_adapters(self, api: Api, url: str) -> None:
        add_adapter(api, "poet")
        add_adapter(api, "poet", 2)
        for name, ref in (
            ("poet", AdapterRef("poet", 2)),
            ("poet@1", AdapterRef("poet", 1)),
            (None, None),
            ("__base_model__", None),
        ):
            for call in (generated, streamed):
                await call(lorax, url, adapter_id=name, adapter_source="local")
                assert (await api.last_request()).adapter == ref
        for asked in ({"adapter_id": "nobody"}, {"adapter_id": "org/model"}, {"adapter_id": "poet", "api_token": "x"}):
            with pytest.raises(lorax.errors.ValidationError):
                await generated(lorax, url, **asked)
        with pytest.raises(lorax.errors.ValidationError, match="adapter_source is not supported"):
            await generated(lorax, url, adapter_id="poet", adapter_source="hub")

    async def test_its_own_parameters(self, api: Api, url: str) -> None:
        answer = await generated(
            lorax, url, return_k_alternatives=2, ignore_eos_token=True, temperature=0, max_new_tokens=None
        )
        assert [token.alternative_tokens[0].id for token in answer.details.tokens] == api.reply
        assert answer.details.prompt_tokens == len(IDS)
        params = (await api.last_request()).sampling
        assert (params.ignore_eos, params.temperature, params.logprobs) == (True, 0.0, 2)
        assert (await generated(lorax, url, details=False)).details is None
        schema = {"type": "json_object", "schema": {"type": "object"}}
        await generated(lorax, url, response_format=schema)
        assert (await api.last_request()).grammar is not None


class TestTextGeneration:
    async def test_its_own_parameters(self, api: Api, url: str) -> None:
        answer = await generated(text_generation, url, top_n_tokens=2, frequency_penalty=0.5)
        assert [[token.id for token in tops] for tops in answer.details.top_tokens] == [[id] for id in api.reply]
        events = await streamed(text_generation, url, top_n_tokens=2)
        assert [event.top_tokens[0].id for event in events] == api.reply
        assert (await api.last_request()).sampling.logprobs == 2
        grammar = text_generation.types.Grammar(type="regex", value="a+")
        await generated(text_generation, url, grammar=grammar, truncate=1)
        assert (await api.last_request()).grammar is not None

    async def test_a_chat(self, api: Api, url: str) -> None:
        messages = [{"role": "user", "content": "hi"}]
        answer = await text_generation.AsyncClient(url, timeout=120).chat(messages, max_tokens=20)
        assert answer.choices[0].message.content == REPLY
        assert answer.system_fingerprint == api.base.fingerprint
        assert answer.model == api.base.name
