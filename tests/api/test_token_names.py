"""Tokens, their bytes and their places in a text, as the dialects tell them of a sequence with characters of several
tokens."""

from __future__ import annotations

from typing import Any

import pytest

from coserve.api.generation.choice_decoder import ChoiceDecoder, ChoiceDelta
from coserve.api.openai.completions import by_text, logprobs_of
from coserve.core.link.generation import Tokens
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.schemas.generation import ChosenLogprob, Logprob
from coserve.core.types import FinishReason
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.api_server import Api, read_events, tokenizer
from tests.support.tokenizers import byte_level, sentencepiece_like

ROLES = {"bos_token": "<bos>", "eos_token": "<eos>"}
KINDS = {
    "byte_level": Tokenizer(byte_level(), special_tokens=ROLES),
    "sentencepiece": Tokenizer(sentencepiece_like(), special_tokens=ROLES),
}
ANSWER = " the 🐈 and the 🙂!"


def decoded(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], finished: FinishReason, prepended: int | None = None
) -> list[ChoiceDelta]:
    """The deltas of a sequence whose tokens come one by one; the first brings the prompt's log-probabilities."""
    decoder = ChoiceDecoder(
        tokenizer,
        prompt,
        stops=(),
        stop_tokens={},
        min_tokens=0,
        logprobs=True,
        prompt_logprobs=True,
        prepended=prepended,
    )
    score = [TokenLogprob(-0.5)]
    return [
        decoder.feed(
            Tokens(
                id="r",
                tokens=(id,),
                logprobs=PackedLogprobs.of(score),
                prompt_logprobs=PackedLogprobs.of([] if place else score * (len(prompt) - 1)),
                finished=finished if place == len(ids) - 1 else None,
            )
        )
        for place, id in enumerate(ids)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_offsets_are_those_of_the_text(kind: str) -> None:
    own = KINDS[kind]
    prompt, ids = own.encode("say 🐈 to"), own.encode_continuation(ANSWER)
    deltas = decoded(own, prompt, ids, FinishReason.LENGTH)
    text = "".join(delta.text for delta in deltas)
    assert text == ANSWER
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    found = logprobs_of(entries, by_text)
    assert "".join(entry.text for entry in entries) == text
    assert b"".join(map(own.vocabulary.utf8, ids)).decode() == text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset), (token, offset)
    shown = [entry for delta in deltas for entry in delta.prompt_logprobs or ()]
    assert "".join(entry.text for entry in shown) == own.decode(prompt)
    assert [entry.token_id for entry in shown] == prompt


def test_a_character_that_the_end_cuts_off_is_part_of_the_last_tokens_text() -> None:
    own = KINDS["byte_level"]
    ids = own.encode("so 🐈")[:-1]
    deltas = decoded(own, own.encode("x"), [*ids, own.eos_token_ids[0]], FinishReason.STOP)
    assert "".join(delta.text for delta in deltas) == own.decode(ids)
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert "".join(entry.text for entry in entries) == own.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompts_text_is_shown_with_its_special_tokens_and_without_those_before_it(kind: str) -> None:
    own, text = KINDS[kind], "the<eos>lo <bos>"
    for add_special in (True, False):
        prompt = own.encode(text, add_special=add_special)
        (delta,) = decoded(
            own, prompt, own.encode("x")[-1:], FinishReason.LENGTH, prepended=own.prepended * add_special
        )
        assert "".join(entry.text for entry in delta.prompt_logprobs or ()) == own.decode(
            own.encode(text, add_special=False), skip_special=False
        )


def test_the_scored_token_keeps_its_own_number() -> None:
    """As lm-evaluation-harness reads it: the likeliest key of `top_logprobs` is the scored token, or it is not
    greedy."""
    own = KINDS["sentencepiece"]
    spaced, plain, raw = _id("▁t"), _id("t"), _id("<0x74>")
    word, inside, byte = map(own.vocabulary.name, (spaced, plain, raw))
    assert (word, inside, byte) == (" t", "t", "t")
    top = [
        Logprob(token_id=id, token=own.vocabulary.name(id), logprob=value)
        for id, value in ((spaced, -0.1), (raw, -2.0), (plain, -3.0))
    ]
    entry = ChosenLogprob(token_id=plain, token=inside, text="t", logprob=-3.0, top=top)
    (found,) = logprobs_of([entry], by_text).top_logprobs
    assert found == {"t": -3.0, " t": -0.1, f"token_id:{raw}": -2.0}


def _id(piece: str) -> int:
    id = sentencepiece_like().token_to_id(piece)
    assert id is not None
    return id


async def test_a_character_of_several_tokens_in_each_dialect(api: Api) -> None:
    text = "a 🐈, then b"
    ids = api.reply = tokenizer().encode(text)
    names = [tokenizer().vocabulary.name(id) for id in ids]
    assert any(name.startswith("bytes:") for name in names)
    body: dict[str, Any] = {"prompt": "x", "logprobs": 2, "max_tokens": 64}
    _, found = await api.call("POST", "/v1/completions", json=body)
    scores = found["choices"][0]["logprobs"]
    assert (found["choices"][0]["text"], scores["tokens"]) == (text, names)
    assert scores["text_offset"][-1] == len(text) - len(names[-1])
    assert all(name in top for name, top in zip(names, scores["top_logprobs"], strict=True))
    async with api.http.post("/v1/completions", json=body | {"stream": True}) as response:
        parts = [
            event["data"]["choices"] for event in read_events(await response.text()) if isinstance(event["data"], dict)
        ]
    offsets = [offset for (choice,) in parts if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
    assert offsets == scores["text_offset"]

    turns = [{"role": "user", "content": "x"}]
    _, found = await api.call(
        "POST", "/v1/chat/completions", json={"messages": turns, "logprobs": True, "top_logprobs": 1}
    )
    content = found["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
    assert [entry["token"] for entry in content] == names
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in content)

    _, found = await api.call("POST", "/generate", json={"inputs": "x", "parameters": {"details": True}})
    assert "".join(token["text"] for token in found["details"]["tokens"]) == text
    _, found = await api.call("POST", "/generate", json={"prompt": "x", "logprobs": 0})
    entries = found["choices"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == names
    assert "".join(entry["text"] for entry in entries) == text
    _, found = await api.call("POST", "/tokenize", json={"prompt": text, "return_token_strs": True})
    assert found["token_strs"] == names
