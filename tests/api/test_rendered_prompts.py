"""Prompts and rows that have their BOS already, and rows that teach no end."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from coserve.api.jobs.submission import SMALL_FILE
from coserve.core.link.generation import Generate
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.api_server import serve_api
from tests.support.tokenizers import sentencepiece_like


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_nothing_is_put_before_a_rendered_prompt(tmp_path: Path, path: str) -> None:
    own = Tokenizer(sentencepiece_like(), special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})
    async with serve_api(tmp_path, tokens=own) as api:
        for add, begin in ((None, [own.bos_token_id] * 2), (True, [own.bos_token_id] * 2), (False, [own.bos_token_id])):
            body = {"prompt": "<bos><|user|>hi"} | ({} if add is None else {"add_special_tokens": add})
            await api.answered(200, "POST", path, json=body)
            sent = (await api.engine.saw(Generate))[-1]
            assert isinstance(sent, Generate)
            assert list(sent.prompt) == [*begin, *own.encode("<|user|>hi", add_special=False)]


TEMPLATE = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"  # noqa: E501
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "lo"}]}
PLAIN = {"prompt": "the", "completion": "lo"}
TWICE = {"prompt": "<bos>the", "completion": "lo"}


NOTES: list[tuple[list[dict[str, object]], list[str]]] = [
    ([PLAIN, PLAIN], []),
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
            job = await api.answered(202, "POST", "/finetune", json={"adapter": f"new-{number}", "path": "rows.jsonl"})
            assert [note.split(":")[0] for note in job["notes"]] == said, blank
