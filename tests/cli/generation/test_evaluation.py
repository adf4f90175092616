"""`coserve eval`: loss, token accuracy and matches of an adapter and of the base, by a real daemon."""

from __future__ import annotations

import asyncio
import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coserve.cli.app import run as run_command
from coserve.core.errors import InvalidRequest, MalformedRow
from coserve.core.sampling import SamplingDefaults
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.evaluation import matcher, question
from tests.support.real_server import serve_real

ROW = {"prompt": "Today we", "completion": " sighted land, land, land."}


def base_loss(prompt: str, answer: str) -> tuple[float, int]:
    """transformers' mean loss of the answer's tokens, and their number."""
    folder = str(resources.files("coserve") / "assets" / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before, after = tokenizer(prompt).input_ids, tokenizer(answer, add_special_tokens=False).input_ids
    labels = torch.tensor([[-100] * len(before) + after])
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([before + after]), labels=labels).loss), len(after)


@pytest.mark.slow
async def test_an_adapter_that_has_learned_its_rows_beats_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps(ROW)}\n")
    loss, tokens = base_loss(ROW["prompt"], ROW["completion"])
    penalty = SamplingDefaults(repetition_penalty=2.0)  # of the base: it is not the evaluation's
    async with serve_real(tmp_path / "data", sampling_defaults=penalty) as api:
        training = {"steps": 12, "batch_tokens": 64, "learning_rate": 0.02}
        body = {"adapter": "a", "data": [ROW], "training": training, "lora": {"r": 4}}
        job = await api.answered(202, "POST", "/finetune", json=body)
        await api.job_until(job["id"], "succeeded")
        command = ["eval", "a", str(data), "--max-tokens", "16", "--url", api.url]
        assert await asyncio.to_thread(run_command, [*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert await asyncio.to_thread(run_command, [*command, "--no-base"]) == 0
    assert list(found) == ["a", "base"]
    assert found["base"]["loss"] == pytest.approx(loss, rel=1e-3)
    assert found["base"]["tokens"] == tokens
    assert (found["a"]["match"], found["a"]["token_accuracy"]) == (1.0, 1.0)
    assert found["a"]["loss"] < 0.5 < found["base"]["loss"]
    assert "token accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("regex", "field", "got", "expected", "same"),
    [
        (None, None, " Paris\n", "Paris", True),
        (None, None, "Paris.", "Paris", False),
        (r"(\d+)$", None, "so it is 42", "6 * 7 = 42", True),
        (r"(\d+)$", None, "nothing", "nothing", False),
        (None, "a.b", '{"a": {"b": [1]}, "c": 2}', '{"a": {"b": [1]}}', True),
        (None, "a.b", "no JSON", '{"a": {"b": [1]}}', False),
        (None, "a.b", '{"a": 1}', '{"a": 1}', False),
    ],
)
def test_answers_are_compared_by_what_was_asked_for(
    regex: str | None, field: str | None, got: str, expected: str, same: bool
) -> None:
    assert matcher(regex, field)(got, expected) is same


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="both"):
        matcher("a", "b")
    with pytest.raises(InvalidRequest, match="regular expression"):
        matcher("(", None)
    for row in ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(MalformedRow):
            [question(each) for each in parse_jsonl(json.dumps(row).encode())]


def test_a_chat_asks_for_its_last_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (row,) = parse_jsonl(json.dumps({"messages": messages}).encode())
    assert question(row).answer == "b"
    assert question(row).source == {"messages": messages[:1]}
