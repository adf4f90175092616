"""A wrong field name is answered with the right one: other libraries' names, slips, and fields in the wrong object."""

from __future__ import annotations

import dataclasses
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import TrainingArguments

from coserve.api.http.parsing import decode_json
from coserve.api.openai.schemas import ChatRequest, LoadLoraRequest
from coserve.client.options import as_struct
from coserve.config import Config
from coserve.core.errors import InvalidRequest, UnknownField
from coserve.core.hints import (
    ALIASES,
    NEEDLESS_OPTIONS,
    OPTION_ALIASES,
    OTHER_UNITS,
    OTHER_WAYS,
    fields_of,
    hint,
    option_hint,
)
from coserve.core.schemas.adapters import AliasRequest, ImportRequest
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.core.types import LoraSettings

ROOT = Path(__file__).resolve().parent.parent


def message(body: dict[str, object], kind: type) -> str:
    with pytest.raises(UnknownField) as refused:
        decode_json(json.dumps(body).encode(), kind)
    return str(refused.value)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"image_url": {}, "type": "image_url"}])
def test_images_are_refused_by_name(part: dict[str, object]) -> None:
    chat = {"model": "a", "messages": [{"role": "user", "content": [part]}]}
    with pytest.raises((InvalidRequest, UnknownField), match="coserve reads text alone, no images"):
        decode_json(json.dumps(chat).encode(), ChatRequest)


TRAIN, GENERATE = {"adapter": "a"}, {"prompt": "x"}


@pytest.mark.parametrize(
    ("kind", "body", "name", "meant"),
    [
        *(
            (FinetuneRequest, TRAIN, f"lora.{name}", meant)
            for name, meant in (("rank", "r"), ("lora_r", "r"), ("alhpa", "alpha"))
        ),
        *((FinetuneRequest, TRAIN, f"lora.{name}", "bd_blocks") for name in ("nblocks", "use_bdlora")),
        *((FinetuneRequest, TRAIN, f"training.{name}", "epochs") for name in ("n_epochs", "epoch")),
        *((FinetuneRequest, TRAIN, f"training.{name}", "learning_rate") for name in ("lr", "learning-rate")),
        (FinetuneRequest, TRAIN, "training.max_seq_len", "max_length"),
        *((FinetuneRequest, TRAIN, name, "training.epochs") for name in ("epochs", "n_epochs")),
        (FinetuneRequest, TRAIN, "lora_alpha", "lora.alpha"),
        (GenerateRequest, GENERATE, "max_new_tokens", "max_tokens"),
        (GenerateRequest, GENERATE, "temprature", "temperature"),
        (GenerateRequest, GENERATE, "stop_sequences", "stop"),
        (GenerateRequest, GENERATE, "topp", "top_p"),
    ],
)
def test_a_slip_and_a_name_of_another_library_are_answered_with_ours(
    kind: type, body: dict[str, object], name: str, meant: str
) -> None:
    """In the object of that name, or of another one: with its path."""
    place, _, own = name.rpartition(".")
    said = message(body | ({place: {own: 1}} if place else {own: 1}), kind)
    assert f"unknown field {own!r}; did you mean {meant!r}?" in said


@pytest.mark.parametrize(
    ("kind", "meant"),
    [(FinetuneRequest, "adapter"), (ImportRequest, "name"), (LoadLoraRequest, "lora_name"), (AliasRequest, "target")],
)
def test_names_of_the_field_with_the_adapters_name(kind: type, meant: str) -> None:
    for name in {"adapter", "name", "id", "lora_name", "adapter_name"} - {meant}:
        assert f"unknown field {name!r}; did you mean {meant!r}?" in message({name: "pirate"}, kind)


ONE_SIZE = "coserve has one batch size for all devices and micro-batches: training.batch_rows"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gradient_accumulation_steps", ONE_SIZE),
        ("learning_rate_multiplier", "coserve takes the rate itself: training.learning_rate"),
    ],
)
@pytest.mark.parametrize("place", ["training", None])
def test_a_name_with_another_unit_is_answered_with_the_unit(name: str, says: str, place: str | None) -> None:
    """Its value under our name would train wrongly: 8 tokens a step, a rate of 2."""
    body = {"training": {name: 1}} if place else {name: 1}
    said = message({"adapter": "a", **body}, FinetuneRequest)
    assert says in said and "did you mean" not in said


@pytest.mark.parametrize("name", ["max_length", "typical_p", "best_of"])
def test_a_name_of_generation_that_means_something_else_is_no_alias(name: str) -> None:
    assert "did you mean" not in message({"prompt": "x", name: 1}, GenerateRequest)


def test_a_variable_of_the_chat_template_is_sent_to_its_field() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "enable_thinking": False}
    assert "; chat_template_kwargs has the variables" in message(body, ChatRequest)


def test_what_is_like_nothing_gets_no_hint() -> None:
    assert "did you mean" not in message({"prompt": "x", "zzz": 1}, GenerateRequest)


@pytest.mark.parametrize(
    ("place", "name", "says"),
    [
        ("training", "gradient_checkpointing", "layers are recomputed as each job's memory asks for"),
        ("training", "save_total_limit", "the daemon's --keep-checkpoints"),
        ("training", "load_best_model_at_end", "training.early_stopping_patience"),
        ("training", "load_in_4bit", "the daemon's --quantization"),
        ("lora", "modules_to_save", "the A and B of modules"),
        ("lora", "layer_replication", "other variants of LoRA are not supported"),
        ("training", "packing", "rows are packed without padding"),
        ("training", "assistant_only_loss", "training.train_on"),
        ("training", "dataloader_num_workers", "--tokenizer-workers"),
    ],
)
def test_a_setting_that_is_another_here_is_answered_with_what_is_done_instead(place: str, name: str, says: str) -> None:
    for body in ({place: {name: 1}}, {name: 1}):
        said = message({"adapter": "a", **body}, FinetuneRequest)
        assert f"unknown field {name!r}; " in said and says in said


OF_TRL = (
    *("activation_offloading", "assistant_only_loss", "beta", "chat_template_path", "completion_only_loss"),
    *("dataset_kwargs", "dataset_num_proc", "dataset_text_field", "disable_dropout", "eos_token", "eval_packing"),
    *("f_alpha_divergence_coef", "f_divergence_type", "force_use_ref_model", "generate_during_eval", "ld_alpha"),
    *("loss_type", "loss_weights", "max_completion_length", "max_length", "max_prompt_length", "max_seq_length"),
    *("model_adapter_name", "model_init_kwargs", "packing", "packing_strategy", "pad_to_multiple_of", "pad_token"),
    *("padding_free", "precompute_ref_batch_size", "precompute_ref_log_probs", "ref_adapter_name"),
    *("ref_model_init_kwargs", "ref_model_mixup_alpha", "ref_model_sync_steps", "reference_free", "rpo_alpha"),
    *("shuffle_dataset", "sync_ref_model", "truncation_mode", "use_liger_loss", "use_logits_to_keep"),
    "use_weighting",
)
"""Fields of `SFTConfig` and `DPOConfig` besides those of `TrainingArguments`."""


def test_every_setting_of_the_trainers_and_of_peft_is_known() -> None:
    known = fields_of(FinetuneRequest)
    theirs = {"training": (*(one.name for one in dataclasses.fields(TrainingArguments)), *OF_TRL)}
    theirs["lora"] = tuple(one.name for one in dataclasses.fields(LoraConfig))
    for place, names in theirs.items():
        unknown = [name for name in names if f"{place}.{name}" not in known and not hint(name, place, known)]
        assert not unknown


def test_what_is_done_instead_names_what_there_is_and_no_other_hint() -> None:
    known = {*fields_of(FinetuneRequest), *fields_of(GenerateRequest)}
    for way in OTHER_WAYS:
        assert set(re.findall(r"\b(?:training|lora)(?:\.\w+)+", way)) <= known
        assert set(re.findall(r"--[\w-]+", way)) <= set(SERVE)
    hinted = {*ALIASES, *OTHER_UNITS, *OPTION_ALIASES, *NEEDLESS_OPTIONS, *(path.rpartition(".")[2] for path in known)}
    patterns = " ".join(OTHER_WAYS.values()).split()
    assert len(patterns) == len(set(patterns))
    assert not [name for name in hinted for pattern in patterns if fnmatchcase(name, pattern)]


def test_every_alias_leads_to_a_field() -> None:
    known = {path.rpartition(".")[2] for kind in (FinetuneRequest, GenerateRequest) for path in fields_of(kind)}
    assert set(ALIASES.values()) | {field for field, _ in OTHER_UNITS.values()} <= known
    assert not set(ALIASES) & set(OTHER_UNITS)


def test_the_sdk_hints_too_and_every_error_shows_its_field() -> None:
    with pytest.raises(InvalidRequest, match=r"lora\.lora_r.*did you mean 'r'"):
        as_struct({"lora_r": 1}, LoraSettings, "lora")
    with pytest.raises(InvalidRequest, match=r"^temperature: expected a number >= 0.0, got -1.0$"):
        decode_json(b'{"prompt": "x", "temperature": -1.0}', GenerateRequest)
    with pytest.raises(InvalidRequest, match=r"^lora\.r: expected an integer, got a string$"):
        decode_json(b'{"adapter": "a", "lora": {"r": "x"}}', FinetuneRequest)
    assert str(InvalidRequest("lora.r: wrong", field="lora.r")) == "lora.r: wrong"


FINETUNE = ("--rank", "--alpha", "--targets", "--epochs", "--learning-rate", "--batch-tokens", "--continue-from")
SERVE = tuple(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Config))


@pytest.mark.parametrize(
    ("options", "given", "says"),
    [
        (FINETUNE, "--lr", "did you mean '--learning-rate'?"),
        (FINETUNE, "--num_train_epochs", "did you mean '--epochs'?"),
        (FINETUNE, "-r", "did you mean '--rank'?"),
        (FINETUNE, "--lora-r", "did you mean '--rank'?"),
        (FINETUNE, "--lora-alpha", "did you mean '--alpha'?"),
        (FINETUNE, "--target-modules", "did you mean '--targets'?"),
        (FINETUNE, "--epoch", "did you mean '--epochs'?"),
        ((*FINETUNE, "--batch-rows"), "--batch-size", "did you mean '--batch-rows'?"),
        (SERVE, "--max-running-requests", "did you mean '--max-running'?"),
        (SERVE, "--max-concurrent-requests", "did you mean '--max-running'?"),
        (FINETUNE, "--gradient-checkpointing", "layers are recomputed"),
        (SERVE, "--load-in-4bit", "the daemon's --quantization"),
        (SERVE, "--tensor-parallel-size", "did you mean '--tp'?"),
        (SERVE, "--enable-lora", "adapters of any number and rank"),
        (SERVE, "--seed", "each request has its own seed"),
        (SERVE, "--max-cpu-loras", "in bytes"),
        (SERVE, "--lora-paths", "coserve adapters import"),
    ],
)
def test_an_unknown_option_is_answered_as_a_field_is(options: tuple[str, ...], given: str, says: str) -> None:
    assert says in option_hint(given, options)


@pytest.mark.parametrize("given", ["--zzz", "--max-length", "--enable-lora"])
def test_an_option_that_is_like_none_of_the_command_gets_no_hint(given: str) -> None:
    assert not option_hint(given, FINETUNE)


def test_every_alias_of_an_option_leads_to_one() -> None:
    assert {f"--{name.replace('_', '-')}" for name in OPTION_ALIASES.values()} <= {*FINETUNE, *SERVE}


def test_the_page_for_users_of_vllm_has_every_option_that_is_known() -> None:
    section = (
        (ROOT / "docs" / "guide" / "from-vllm-and-peft.md").read_text().partition("## Options")[2].partition("\n## ")[0]
    )
    rows = [[re.findall(r"`--([\w-]+)", cell) for cell in line.split("|")[1:3]] for line in section.splitlines()]
    shown = {name.replace("-", "_"): ours for theirs, ours in (row for row in rows if len(row) == 2) for name in theirs}
    ours_of_vllm = {name: option for name, option in OPTION_ALIASES.items() if option != "rank"}
    # Options that have the same name, and one that is a setting of PEFT, too.
    others = {"quantization", "chat_template", "generation_config", "revision"}
    assert shown.keys() == ours_of_vllm.keys() | NEEDLESS_OPTIONS.keys() | others
    for name, option in ours_of_vllm.items():
        assert shown[name] == [option.replace("_", "-")]
