"""What `coserve finetune` asks for by its options and by `--set FIELD=VALUE`, checked as the API checks it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.cli import common
from coserve.cli.app import run
from coserve.cli.failures import USAGE
from coserve.core.schemas.jobs import FinetuneRequest
from tests.support.sdk import job


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the client was asked for."""
    found: list[dict[str, Any]] = []

    def finetune(name: str, **given: Any) -> SimpleNamespace:
        fields = FinetuneRequest.__struct_fields__
        found.append({field: value for field, value in given.items() if field in fields and value is not None})
        return SimpleNamespace(info=job())

    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(finetune=finetune)))
    return found


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    return str(path)


@pytest.mark.parametrize(
    ("options", "request_fields"),
    [
        (
            ["--set", "training.schedule=cosine", "--set", "lora.dropout=0.05", "--set", "training.seed=3"],
            {"training": {"schedule": "cosine", "seed": 3}, "lora": {"dropout": 0.05}},
        ),
        (
            ["--set", "training.seed=3", "--steps", "5", "--rank", "4", "--set", "lora.rslora=true"],
            {"training": {"steps": 5, "seed": 3}, "lora": {"r": 4, "rslora": True}},
        ),
        (["--set", "teacher=big@2", "--set", "metadata.run=3"], {"teacher": "big@2", "metadata": {"run": "3"}}),
        (["--set", "metadata.rule=a=b"], {"metadata": {"rule": "a=b"}}),
        (
            ['--set=lora.rank_pattern={"layers.0.q_proj": 4}', "--set", 'lora.targets=["q_proj"]'],
            {"lora": {"rank_pattern": {"layers.0.q_proj": 4}, "targets": ["q_proj"]}},
        ),
        (
            ["--set", 'lora.target_parameters=["experts.gate_up_proj", "experts.down_proj"]'],
            {"lora": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}},
        ),
        (
            ["--dpo-beta", "0.2", '--set=training.loss={"type": "dpo", "beta": 0.2}'],
            {"training": {"loss": {"type": "dpo", "beta": 0.2}}},
        ),
        (
            ["--dpo-beta", "0.2", "--set", "training.loss.reference=base"],
            {"training": {"loss": {"type": "dpo", "beta": 0.2, "reference": "base"}}},
        ),
        (
            ["--set", "training.loss.beta=0.3", "--set", "training.loss.type=dpo"],
            {"training": {"loss": {"type": "dpo", "beta": 0.3}}},
        ),
        (["--set", "training.max_length=null"], {"training": {"max_length": None}}),
        (["--set", "training.epochs=2", "--epochs", "2"], {"training": {"epochs": 2}}),
        (["--set", "on_conflict=fork"], {"on_conflict": "fork"}),
        (["--rank", "4", "--targets", "q_proj, v_proj"], {"lora": {"r": 4, "targets": ["q_proj", "v_proj"]}}),
        (["--targets", "q_proj", "--targets", "k_proj,v_proj"], {"lora": {"targets": ["q_proj", "k_proj", "v_proj"]}}),
        (["--targets", ","], {"lora": {"targets": []}}),
        (["--optimizer", "lion_8bit"], {"training": {"optimizer": "lion_8bit"}}),
        (
            ["--learning-rate", "1e-4", "--lora-plus-ratio", "16", "--neftune-alpha", "5"],
            {"training": {"learning_rate": 1e-4, "lora_plus_ratio": 16.0, "neftune_alpha": 5.0}},
        ),
        (
            ["--sample-prompt", "Ahoy, ", "--sample-prompt", "Who?", "--sample-steps", "5", "--sample-max-tokens", "9"],
            {"training": {"sample_prompts": ["Ahoy, ", "Who?"], "sample_steps": 5, "sample_max_tokens": 9}},
        ),
        (["--columns", "prompt=a question, completion=b"], {"columns": {"prompt": "a question", "completion": "b"}}),
        (["--columns", "prompt=q", "--columns", "completion=a=b"], {"columns": {"prompt": "q", "completion": "a=b"}}),
        (["--set", 'columns={"prompt": "a,b"}'], {"columns": {"prompt": "a,b"}}),
        ([], {}),
    ],
)
def test_fields_become_those_of_the_request(
    options: list[str], request_fields: dict[str, Any], asked: list[dict[str, Any]], rows: str
) -> None:
    assert run(["finetune", "name", rows, "--detach", *options]) == 0
    assert asked == [request_fields]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "training.shedule=cosine"], "unknown field 'shedule'; did you mean 'schedule'? (see"),
        (["--set", "schedule=cosine"], "schedule: unknown field 'schedule'; did you mean 'training.schedule'? (see"),
        (["--set", "training.lora_dropout=1"], "did you mean 'lora.dropout'?"),
        (["--set", "training.gradient_accumulation_steps=8"], "one batch size for all devices and micro-batches"),
        (["--set", "training.seed=x"], "training.seed: expected an integer, got a string"),
        (["--set", "training.schedule=step"], "training.schedule: expected one of linear, cosine, constant"),
        (["--set", "training.optimizer=adam"], "did you mean 'adamw'?"),
        (["--optimizer", "sgd"], "'--optimizer': expected one of adamw, adamw_8bit, "),
        (["--optimizer", "adamw_torch"], ", got 'adamw_torch'; did you mean 'adamw'?"),
        *(
            (["--columns", text], "expected FIELD=COLUMN,...")
            for text in ("prompt", "prompt=", "=question", "prompt=q,,a=b")
        ),
        (["--set", "training.seed.x=3"], "training.seed: expected an integer, got an object"),
        (["--set", "training=3"], "training: expected an object, got an integer"),
        (["--set", "training.seed"], "expected FIELD=VALUE, got 'training.seed'"),
        (["--set", "=3"], "expected FIELD=VALUE, got '=3'"),
        (["--set", "training..seed=3"], "expected FIELD=VALUE, got 'training..seed=3'"),
        (["--set", "training.epochs=2", "--epochs", "3"], "training.epochs, got two: --epochs and --set"),
        (["--set", "lora.r=2", "--rank", "3"], "expected one value of lora.r, got two: --rank and --set"),
        (["--set", "training.seed=2", "--set", "training.seed=3"], "one value of training.seed, got two: --set"),
        (["--set", "training.seed=2", "--set", "training=null"], "one value of training, got two: --set and --set"),
        (['--set=training.loss={"type": "dpo", "beta": 0.3}', "--dpo-beta", "0.2"], "got two: --dpo-beta and --set"),
        (["--set", "training.loss=null", "--dpo-beta", "0.2"], "training.loss, got two: --dpo-beta and --set"),
        (["--set", "adapter=other"], "adapter: give it as the argument ADAPTER"),
        (["--set", "path=rows.jsonl"], "path: give the rows as the argument FILE"),
        (["--set", 'data=[{"text": "a"}]'], "data: give the rows as the argument FILE"),
        (["--set", "lora.dropout=0.1", "--continue-from", "name"], "--continue-from has its own"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(
    options: list[str], says: str, asked: list[dict[str, Any]], rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["finetune", "name", rows, *options]) == USAGE
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert asked == []


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("document=5", "document: give the document as the argument FILES"),
        ("document.text=other", "document: give the document as the argument FILES"),
        ("document.path=other.md", "document: give the document as the argument FILES"),
        ("teacher=other", "teacher: coserve learn does not take it"),
    ],
)
def test_learn_takes_its_document_as_an_argument(
    assignment: str, says: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["learn", "name", rows, "--set", assignment, "--url", "http://127.0.0.1:1"]) == USAGE
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_learn_refuses_rows_and_names_finetune(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["learn", "name", rows, "--url", "http://127.0.0.1:1"]) == 1
    assert f"got rows: coserve finetune NAME {Path(rows).name} trains on them" in capsys.readouterr().err
