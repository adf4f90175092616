"""Prompts that a chat template rendered: `add_special_tokens` false puts nothing before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.link import Generate
from coserve.pretrained.tokenizer import Tokenizer
from tests.support.api_server import serve_api
from tests.support.tokenizers import sentencepiece_like


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_nothing_is_put_before_a_rendered_prompt(tmp_path: Path, path: str) -> None:
    own = Tokenizer(sentencepiece_like(), special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})
    async with serve_api(tmp_path, tokens=own) as api:
        for add, begin in ((None, [own.bos_token_id] * 2), (True, [own.bos_token_id] * 2), (False, [own.bos_token_id])):
            body = {"prompt": "<bos><|user|>hi"} | ({} if add is None else {"add_special_tokens": add})
            status, answer = await api.call("POST", path, json=body)
            assert status == 200, answer
            sent = (await api.engine.saw(Generate))[-1]
            assert isinstance(sent, Generate)
            assert list(sent.prompt) == [*begin, *own.encode("<|user|>hi", add_special=False)]
