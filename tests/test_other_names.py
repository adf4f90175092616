"""Settings under the names of PEFT and of transformers' and TRL's trainers are read as they are meant."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from peft import LoraConfig

from coserve.api.http.parsing import decode_dialect, decode_json
from coserve.api.openai.finetuning.schemas import CreateJob
from coserve.cli.finetuning.settings import request_settings
from coserve.client.options import finetune_request
from coserve.core.errors import InvalidRequest, UnknownField
from coserve.core.hints import fields_of
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.core.training.settings import TrainingRequest

PEFT = {
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "use_rslora": True,
    "target_modules": ["q_proj", "v_proj"],
    "init_lora_weights": True,
}
OURS = {"alpha": 8, "dropout": 0.1, "rslora": True, "targets": ["q_proj", "v_proj"]}
TRAINER = {
    "num_train_epochs": 2,
    "max_steps": -1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "warmup_steps": 0.25,
    "lr_scheduler_type": "constant_with_warmup",
    "optim": "paged_adamw_32bit",
    "adam_beta2": 0.95,
    "max_seq_length": 64,
    "save_steps": 7,
}
TRAINING = {
    "epochs": 2,
    "batch_rows": 8,
    "warmup_ratio": 0.25,
    "schedule": "constant",
    "optimizer": "paged_adamw",
    "beta2": 0.95,
    "max_length": 64,
    "checkpoint_steps": 7,
}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"lora": PEFT}, {"lora": OURS}),
        ({"training": TRAINER}, {"training": TRAINING}),
        (
            {"lora": {"r": 4} | PEFT, "training": {"seed": 3} | TRAINER},
            {"lora": {"r": 4} | OURS, "training": {"seed": 3} | TRAINING},
        ),
        ({"lora": LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM").to_dict()}, {"lora": {"r": 4, "alpha": 8}}),
    ],
    ids=["peft", "trainer", "both", "LoraConfig"],
)
def test_other_names_mean_ours(given: dict[str, Any], ours: dict[str, Any]) -> None:
    expected = msgspec.convert({"adapter": "a", **ours}, FinetuneRequest)
    body = msgspec.json.encode({"adapter": "a", **given})
    assert decode_json(body, FinetuneRequest) == expected
    assert finetune_request("a", **given) == expected
    settings = [(f"{place}.{name}", value) for place, own in given.items() for name, value in own.items()]
    paths = [f"{path}={json.dumps(value, default=list)}" for path, value in settings]
    assert finetune_request("a", **request_settings({}, paths)) == expected
    if "peft_type" in given.get("lora", ()):
        assert finetune_request("a", lora=LoraConfig(r=4, lora_alpha=8)) == expected
    if "training" not in given:
        created = msgspec.json.encode({"model": "b", "training_file": "f", **given})
        assert decode_dialect(created, CreateJob).lora == expected.lora


@pytest.mark.parametrize(
    ("place", "given", "says"),
    [
        ("lora", {"alpha": 4, "lora_alpha": 8}, "unknown field 'lora_alpha'; did you mean 'alpha'"),
        ("lora", {"modules_to_save": ["lm_head"]}, "unknown field 'modules_to_save'"),
        ("lora", {"bias": "all"}, "unknown field 'bias'"),
        ("lora", {"layers_to_transform": [0]}, "unknown field 'layers_to_transform'"),
        ("lora", {"peft_type": "LOHA"}, "unknown field 'peft_type'"),
        ("training", {"batch_rows": 4, "per_device_train_batch_size": 8}, "'per_device_train_batch_size'"),
        ("training", {"batch_size": 4, "train_batch_size": 8}, "'train_batch_size'; did you mean 'batch_rows'"),
    ],
)
def test_what_would_be_learned_otherwise_is_refused(place: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownField, match=says):
        decode_json(msgspec.json.encode({"adapter": "a", place: given}), FinetuneRequest)
    with pytest.raises(InvalidRequest, match=says):
        finetune_request("a", **{place: given})


@pytest.mark.parametrize(
    ("place", "given", "says"),
    [
        ("lora", {"target_modules": 5}, "targets: expected a string or an array or null, got an integer"),
        ("training", {"optim": "sgd"}, "paged_lion_8bit, got 'sgd'"),
    ],
)
def test_a_value_that_is_none_of_ours_is_shown(place: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        decode_json(msgspec.json.encode({"adapter": "a", place: given}), FinetuneRequest)
    with pytest.raises(InvalidRequest, match=says):
        finetune_request("a", **{place: given})


def test_our_own_names_keep_their_values() -> None:
    assert finetune_request("a", training={"steps": -1}).training == TrainingRequest(steps=-1)  # the daemon refuses it


def test_the_fields_of_a_type_are_listed_once() -> None:
    """That takes milliseconds, in which the API process answers nobody, for each request with an empty field."""
    assert fields_of(FinetuneRequest) is fields_of(FinetuneRequest)
