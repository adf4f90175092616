"""`/tokenize`, `/detokenize`, `/tokenizer_info` and `/version`; prompts and rows that have their BOS already, and rows
that teach no end."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from coserve import __version__
from coserve.api.http.bodies import SMALL_BODY
from coserve.api.jobs.submission import SMALL_FILE
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.api_server import Api, add_adapter, serve_api, tokenizer
from tests.support.fake_engine import CONTEXT
from tests.support.tokenizers import sentencepiece_like

TEXT = "the cat sat"
TURNS = [{"role": "user", "content": "hi"}]
COUNT = "/v1/messages/count_tokens"


async def test_there_and_back(api: Api) -> None:
    status, body = await api.call(
        "POST", "/tokenize", json={"prompt": TEXT, "return_token_strs": True, "model": "fake"}
    )
    ids = tokenizer().encode(TEXT)
    assert (status, body["tokens"], body["count"], body["max_model_len"]) == (200, ids, len(ids), CONTEXT)
    assert "".join(body["token_strs"]) == TEXT
    status, body = await api.call("POST", "/detokenize", json={"tokens": [*ids, 0]})
    assert (status, body) == (200, {"prompt": TEXT + tokenizer().vocabulary.name(0)})
    status, body = await api.call("POST", "/tokenize", json={"prompt": TEXT, "add_special_tokens": False})
    assert body["tokens"] == tokenizer().encode(TEXT, add_special=False)
    assert "token_strs" not in body


async def test_texts_longer_than_the_context(api: Api) -> None:
    body = await api.answered(200, "POST", "/tokenize", json={"prompt": "word " * 10_000})
    assert body["count"] > CONTEXT
    _, again = await api.call("POST", "/detokenize", json={"tokens": body["tokens"]})
    assert again["prompt"] == "word " * 10_000


async def test_what_the_tokenizer_is(api: Api) -> None:
    body = await api.answered(200, "GET", "/tokenizer_info")
    assert tokenizer().encode(body["eos_token"]) == [tokenizer().eos_token_id]
    assert "messages" in body["chat_template"]
    assert body["model_max_length"] == CONTEXT
    assert await api.call("GET", "/version") == (200, {"version": __version__})


async def test_the_model_is_one_that_there_is(api: Api) -> None:
    add_adapter(api, "poet")
    bodies = {"/tokenize": {"prompt": TEXT}, "/detokenize": {"tokens": [5] * SMALL_BODY}, COUNT: {"messages": TURNS}}
    for path, body in bodies.items():
        for model in ("poet", "poet@1", "fake", "tgi"):
            await api.answered(200, "POST", path, json=body | {"model": model})
        for model in ("nobody", "poet@2"):
            status, answer = await api.call("POST", path, json=body | {"model": model})
            assert status == 404 and model in answer["error"]["message"], answer
    _, answer = await api.call("POST", "/tokenize", json={"prompt": TEXT, "model": "nobody"})
    assert answer["error"]["code"] == "model_not_found"  # as of vLLM's other routes


async def test_bad_input(api: Api) -> None:
    for path, body, status, field in (
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "a b"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404, "model"),
        ("/detokenize", {"tokens": [5], "model": "nobody"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "x", "truncate": 1}, 400, "truncate"),
        ("/detokenize", {"tokens": [4096]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
    ):
        got, answer = await api.call("POST", path, json=body)
        assert (got, answer["error"]["param"]) == (status, field), body
        await api.works()


async def test_a_token_id_above_the_vocabulary_is_named_with_its_position(api: Api) -> None:
    ids = [4095, 7, 5000, 4096]
    for path, field in (("/generate", "prompt"), ("/v1/completions", "prompt"), ("/detokenize", "tokens")):
        _, answer = await api.call("POST", path, json={field: ids})
        assert "expected token ids below 4096 (0 to 4095), got 5000 at position 2" in answer["error"]["message"]


async def test_texts_in_memory_are_bounded(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data", max_texts=0) as api:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            await api.refused(429, "queue_full", "POST", path, json=body)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_nothing_is_put_before_a_rendered_prompt(tmp_path: Path, path: str) -> None:
    own = Tokenizer(sentencepiece_like(), special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})
    async with serve_api(tmp_path, tokens=own) as api:
        for add, begin in ((None, [own.bos_token_id] * 2), (True, [own.bos_token_id] * 2), (False, [own.bos_token_id])):
            body = {"prompt": "<bos><|user|>hi"} | ({} if add is None else {"add_special_tokens": add})
            await api.answered(200, "POST", path, json=body)
            sent = await api.last_request()
            assert list(sent.prompt) == [*begin, *own.encode("<|user|>hi", add_special=False)]


@pytest.mark.parametrize("keep", [1, 4, 400, -1])
@pytest.mark.parametrize("add", [True, False])
async def test_a_long_prompt_keeps_its_last_tokens_and_its_bos(tmp_path: Path, keep: int, add: bool) -> None:
    """As transformers' tokenizers cut them, which vLLM calls."""
    backend, text = sentencepiece_like(), "the lo " * CONTEXT
    own = Tokenizer(backend, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"}, chat_template=TEMPLATE)
    theirs = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like(), truncation_side="left")
    length = CONTEXT - 9 if keep == -1 else keep
    cut = theirs(text, add_special_tokens=add, truncation=True, max_length=length).input_ids
    chat = own.chat([{"role": "user", "content": text}])[-length:]
    given = {"max_tokens": 9, "truncate_prompt_tokens": keep}
    asked = {"prompt": text, "add_special_tokens": add}, {"prompt": [*range(9, CONTEXT), *range(9, 50)]}
    async with serve_api(tmp_path, tokens=own) as api:
        for path, body, ids in (
            *((path, asked[0], cut) for path in ("/generate", "/v1/completions")),
            ("/v1/completions", asked[1], asked[1]["prompt"][-length:]),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, chat),
        ):
            status, answer = await api.call("POST", path, json=body | given)
            if length >= CONTEXT:
                assert status == 400 and answer["error"]["code"] in ("prompt_too_long", "context_length_exceeded")
            else:
                assert status == 200, answer
                assert list((await api.last_request()).prompt) == list(ids)
        short = await api.answered(200, "POST", "/generate", json=given | {"prompt": "lo"})
        assert short["usage"]["prompt_tokens"] == min(len(own.encode("lo")), length)


TEMPLATE = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"  # noqa: E501
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "lo"}]}
PLAIN = {"prompt": "the", "completion": "lo"}
TWICE = {"prompt": "<bos>the", "completion": "lo"}


NOTES: list[tuple[list[dict[str, object]], list[str]]] = [
    ([PLAIN, PLAIN], []),
    ([PLAIN | {"label": True}, PLAIN | {"label": False}], []),
    ([PLAIN, TWICE], ["1 of 2 rows begin with two BOS tokens"]),
    ([PLAIN, CHAT, CHAT], ["2 of 3 rows teach no end"]),
    ([{"text": "<bos>the"}, CHAT], ["1 of 2 rows begin with two BOS tokens", "1 of 2 rows teach no end"]),
]


async def test_a_job_notes_what_its_rows_will_not_teach(tmp_path: Path) -> None:
    """In small files and in large ones, which another process reads."""
    roles = {"bos_token": "<bos>", "eos_token": "<eos>"}
    own = Tokenizer(sentencepiece_like(), special_tokens=roles, chat_template=TEMPLATE)
    root = tmp_path / "root"
    root.mkdir()
    async with serve_api(tmp_path / "data", tokens=own, data_root=root) as api:
        for number, ((rows, said), blank) in enumerate(product(NOTES, (0, SMALL_FILE))):
            (root / "rows.jsonl").write_text("\n".join([*map(json.dumps, rows), *[""] * blank]))
            training = {"loss": {"type": "kto"}} if "label" in rows[0] else {}
            asked = {"adapter": f"new-{number}", "path": "rows.jsonl", "training": training}
            job = await api.answered(202, "POST", "/finetune", json=asked)
            assert [note.split(":")[0] for note in job["notes"]] == said, blank
