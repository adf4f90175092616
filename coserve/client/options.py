"""Turns Python arguments into the structs of the API."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import msgspec

from coserve.client.transport import Upload
from coserve.errors import InvalidRequest
from coserve.hints import fields_of, hint
from coserve.names import ADAPTER_FILES
from coserve.schemas import ChatMessage, FinetuneRequest, GenerateRequest, ImportRequest, Job, OnConflict
from coserve.types import LoraSettings, SloClass, TrainingRequest
from coserve.validation import explain

MAX_INLINE_BYTES = 8 << 20
"""Of rows that go in a JSON body, of which the daemon takes 16 MiB. An upload may be as large as its `max_body_bytes`, but few run at once."""

T = TypeVar("T")

Messages = Iterable[ChatMessage | Mapping[str, str]]
Prompt = str | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """How to generate: the further fields of `coserve.schemas.GenerateRequest`, whose defaults hold for what is left
    out. Times in seconds.
    """

    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: str | list[str]
    include_stop_str_in_output: bool
    stop_token_ids: list[int]
    ignore_eos: bool
    logit_bias: dict[int, float]
    logprobs: int
    prompt_logprobs: int
    return_prompt_ids: bool
    skip_special_tokens: bool
    seed: int
    cache_salt: str
    slo_class: SloClass | None
    slo_ttft: float
    slo_tpot: float
    slo_e2e: float


def generate_request(
    prompt: Prompt | None, messages: Messages | None, adapter: str | None, stream: bool, options: GenerateOptions
) -> GenerateRequest:
    """Raises `TypeError` for an unknown option, with the one that was meant, and `InvalidRequest` for messages as a prompt."""
    for name in options.keys() - GenerateOptions.__annotations__.keys():
        meant = hint(name, "", fields_of(GenerateRequest))
        raise TypeError(f"unexpected keyword argument {name!r}{meant}")
    if prompt is not None and not isinstance(prompt, str) and any(isinstance(each, Mapping) for each in prompt):
        raise InvalidRequest("expected a text or token ids, got messages; did you mean 'messages'?", field="prompt")
    return GenerateRequest(
        prompt=prompt if prompt is None or isinstance(prompt, str) else list(prompt),
        messages=None if messages is None else [as_struct(message, ChatMessage, "messages") for message in messages],
        adapter=adapter,
        stream=stream,
        **options,
    )


def finetune_request(
    adapter: str,
    data: Iterable[Mapping[str, Any]] | None,
    path: str | None,
    continue_from: str | None,
    teacher: str | None,
    lora: LoraSettings | Mapping[str, Any] | None,
    training: TrainingRequest | Mapping[str, Any] | None,
    metadata: Mapping[str, str] | None,
    on_conflict: OnConflict,
) -> FinetuneRequest:
    request = FinetuneRequest(
        adapter=adapter,
        data=None if data is None else rows_of(data),
        path=path,
        continue_from=continue_from,
        teacher=teacher,
        lora=None if lora is None else as_struct(lora, LoraSettings, "lora"),
        metadata=dict(metadata or {}),
        on_conflict=on_conflict,
    )
    if training is None:
        return request  # the daemon's defaults hold, not ours
    return msgspec.structs.replace(request, training=as_struct(training, TrainingRequest, "training"))


def rows_of(data: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest` for what is no row, and as `encode`."""
    if isinstance(data, Mapping):
        raise InvalidRequest("expected a list of rows, got one mapping", field="data")
    rows = list[dict[str, Any]]()
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise InvalidRequest(f"expected a mapping, got {type(row).__name__}", field=f"data[{number}]")
        _check_finite(row, f"data[{number}]")
        rows.append(dict(row))
    return rows


def encode(body: msgspec.Struct) -> bytes:
    """The body as JSON. Raises `InvalidRequest` for a value that is NaN or infinite: JSON would have null, which stands for the default."""
    for name in body.__struct_fields__:
        if name != "data":  # `rows_of` has checked its rows
            _check_finite(getattr(body, name), name)
    return msgspec.json.encode(body)


def _check_finite(value: object, field: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"expected a finite number, got {value}", field=field)
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check_finite(getattr(value, name), f"{field}.{name}")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _check_finite(each, f"{field}.{key}")
    elif isinstance(value, list | tuple) and value and not isinstance(value[0], int):  # lists of token ids are long
        for place, each in enumerate(value):
            _check_finite(each, f"{field}[{place}]")


def with_rows(request: FinetuneRequest) -> FinetuneRequest | Upload:
    """The request as it is, or an upload of its rows as a JSONL file where they are too many for a JSON body."""
    if request.data is None:
        return request
    lines = [msgspec.json.encode(row) for row in request.data]
    if sum(map(len, lines)) <= MAX_INLINE_BYTES:
        return request
    return corpus_upload(msgspec.structs.replace(request, data=None), b"".join(line + b"\n" for line in lines))


def corpus_upload(request: FinetuneRequest, file: Path | str | bytes) -> Upload:
    """The settings and a JSONL file, or its content. Raises `InvalidRequest` for a path that is not a file."""
    if not isinstance(file, bytes):
        file = Path(file)
        if not file.is_file():
            found = "a folder" if file.is_dir() else "nothing there"
            raise InvalidRequest(f"expected a JSONL file, got {str(file)!r}: {found}", field="file")
    return Upload(encode(request), (("corpus.jsonl", file),))


def cut_warning(job: Job) -> str | None:
    """A warning about rows that were cut; None: none were."""
    if not job.rows_cut:
        return None
    rows = f"{job.rows_cut} of {job.rows} row{'' if job.rows == 1 else 's'}"
    return (
        f"{rows} {'was' if job.rows_cut == 1 else 'were'} too long and lost a part (the limit is the smallest of "
        "max_length, the base's context and the daemon's micro_batch_tokens)"
    )


def adapter_upload(name: str, folder: Path) -> Upload:
    """The two files of a PEFT folder. Raises `InvalidRequest` if one is not there."""
    if not folder.is_dir():
        raise InvalidRequest(
            f"expected a folder of PEFT files, got {str(folder)!r}, which is not a folder", field="folder"
        )
    for file in ADAPTER_FILES:
        if not (folder / file).is_file():
            raise InvalidRequest(f"expected a file {file!r} in the folder, got none", field="folder")
    return Upload(msgspec.json.encode(ImportRequest(name=name)), tuple((file, folder / file) for file in ADAPTER_FILES))


def as_struct(value: object, type: type[T], field: str) -> T:
    """A struct, or a mapping that says the same. Raises `InvalidRequest` with the path of what is wrong."""
    if isinstance(value, type):
        return value
    try:
        return msgspec.convert(value, type=type)
    except msgspec.ValidationError as error:
        wrong = explain(error, value, type)
        path = field if wrong.field is None else f"{field}.{wrong.field}"
        raise InvalidRequest(f"{path}: {wrong.message}", field=path) from None
