"""Turns Python arguments into the structs of the API."""

from __future__ import annotations

import operator
from collections import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, TypeVar, cast, runtime_checkable

import msgspec

from coserve.client.json_values import check, encode
from coserve.client.transport import Upload
from coserve.core.document_files import read_document, refuse_rows
from coserve.core.errors import InvalidRequest
from coserve.core.hints import fields_of, hint
from coserve.core.messages import ChatMessage
from coserve.core.names import ADAPTER_FILES
from coserve.core.sampling import SamplingOptions
from coserve.core.schemas.adapters import ImportRequest
from coserve.core.schemas.documents import DocumentRequest, UserQuestion
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.schemas.jobs import EvalRequest, FinetuneRequest, Job
from coserve.core.schemas.output_format import ResponseFormat, StructuredOutputs
from coserve.core.training.other_names import with_own_names
from coserve.core.training.settings import TrainingRequest
from coserve.core.types import LoraRequest, LoraSettings, SloClass
from coserve.core.validation import explain

MAX_INLINE_BYTES = 8 << 20
"""Maximum bytes of rows sent in a JSON body; the daemon accepts 16 MiB. More rows are uploaded as a file, which may
have the daemon's `max_body_bytes`, but few uploads run at once."""

T = TypeVar("T")


@runtime_checkable
class PeftConfig(Protocol):
    """PEFT's `LoraConfig`."""

    def to_dict(self) -> dict[str, Any]: ...


LoraOptions = LoraRequest | Mapping[str, Any] | PeftConfig
"""The shape of a new adapter."""

Messages = Iterable[ChatMessage | Mapping[str, object]]
Prompt = str | Sequence[int]


class GenerateOptions(SamplingOptions, total=False):
    """Generation options: the other fields of `coserve.core.schemas.generation.GenerateRequest`, with its defaults.
    Times in seconds."""

    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    n: int
    max_tokens: int | None
    stop: str | list[str]
    include_stop_str_in_output: bool
    stop_token_ids: list[int]
    bad_words: list[str]
    allowed_token_ids: list[int] | None
    logprobs: int
    prompt_logprobs: int
    return_prompt_ids: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    skip_special_tokens: bool
    seed: int
    schema: Mapping[str, Any]
    """JSON schema that the text follows: the short form of `response_format`."""
    response_format: Mapping[str, Any] | ResponseFormat | None
    structured_outputs: Mapping[str, Any] | StructuredOutputs | None
    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    cache_salt: str
    slo_class: SloClass | None
    slo_ttft: float
    slo_tpot: float
    slo_e2e: float


GENERATE_OPTIONS = GenerateOptions.__optional_keys__


def generate_request(
    prompt: Prompt | None, messages: Messages | None, adapter: str | None, stream: bool, options: GenerateOptions
) -> GenerateRequest:
    """Build the request. Raises `TypeError` for an unknown option, with a suggestion, and `InvalidRequest` for a wrong
    prompt or message."""
    for name in options.keys() - GENERATE_OPTIONS:
        meant = hint(name, "", fields_of(GenerateRequest))
        raise TypeError(f"unexpected keyword argument {name!r}{meant}")
    if messages is not None and not isinstance(messages, Iterable):
        raise InvalidRequest(f"expected a list of messages, got {type(messages).__name__}", field="messages")
    fields: dict[str, Any] = {**options}
    schema, given = fields.pop("schema", None), fields.get("response_format")
    if schema is not None:
        if given is not None:
            raise InvalidRequest("expected one of schema and response_format, got both", field="schema")
        given = {"type": "json_schema", "json_schema": {"schema": schema}}
    fields["response_format"] = None if given is None else as_struct(given, ResponseFormat, "response_format")
    if (outputs := fields.get("structured_outputs")) is not None:
        fields["structured_outputs"] = as_struct(outputs, StructuredOutputs, "structured_outputs")
    return GenerateRequest(
        prompt=prompt if prompt is None or isinstance(prompt, str) else _token_ids(prompt),
        messages=None if messages is None else [as_struct(message, ChatMessage, "messages") for message in messages],
        adapter=adapter,
        stream=stream,
        **fields,
    )


def _token_ids(prompt: Iterable[object]) -> list[int]:
    """Return the token ids as a list. Any integers are accepted, such as NumPy's. Bytes are refused: they are undecoded
    text."""
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | abc.Set) or not isinstance(prompt, Iterable):
        raise InvalidRequest(f"expected a text or token ids, got {type(prompt).__name__}", field="prompt")
    given = list(prompt)
    if any(isinstance(each, Mapping) for each in given):
        raise InvalidRequest("expected a text or token ids, got messages; did you mean 'messages'?", field="prompt")
    return [_token_id(each, place) for place, each in enumerate(given)]


def _token_id(value: Any, place: int) -> int:  # noqa: ANN401 - may be wrong
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidRequest(f"expected int, got {type(value).__name__}", field=f"prompt[{place}]") from None


def finetune_request(adapter: str, **given: Any) -> FinetuneRequest:  # noqa: ANN401 - as users give them
    """Build the request from the fields that are not None; for the others, the daemon's defaults apply. Raises
    `InvalidRequest` for rows, metadata or settings of a wrong type; `encode` and `corpus_body` check the values
    inside."""
    fields = {name: value for name, value in given.items() if value is not None}
    for name in ("metadata", "columns"):
        if not isinstance(mapping := fields.get(name, {}), Mapping):
            raise InvalidRequest(f"expected a mapping, got {type(mapping).__name__}", field=name)
        fields[name] = dict(mapping)
    if "data" in fields:
        fields["data"] = rows_of(fields["data"])
    if "lora" in fields:
        fields["lora"] = _lora_request(fields["lora"])
    for name, kind in (("test", EvalRequest), ("training", TrainingRequest), ("document", DocumentRequest)):
        if name in fields:
            fields[name] = as_struct(fields[name], kind, name)
    return FinetuneRequest(adapter=adapter, **fields)


def _lora_request(given: LoraOptions) -> LoraRequest:
    """Return the request's LoRA settings. `given` may be the `LoraSettings` of another job: their fields that a request
    may have are kept. Raises `InvalidRequest`."""
    lora = as_struct(given.to_dict() if isinstance(given, PeftConfig) else given, LoraRequest, "lora")
    if not isinstance(lora, LoraSettings):
        return lora
    for field in ("cartridge", "prefix_tokens", "modules_to_save"):
        if getattr(lora, field):
            raise InvalidRequest(f"expected the shape of an adapter to train, got one with {field}", field="lora")
    return LoraRequest(**{field: getattr(lora, field) for field in LoraRequest.__struct_fields__})


class DocumentOptions(TypedDict, total=False):
    """Options of `learn`: fields of `coserve.core.schemas.documents.DocumentSettings`, with its defaults."""

    recipe: Literal["topk_kd", "ce", "lm", "cartridge", "encoder"]
    prefix_tokens: int
    decoder_lora: bool
    generator: str
    questions: Sequence[UserQuestion | Mapping[str, str]]
    chunk_tokens: int
    overlap_tokens: int
    questions_per_chunk: int
    temperature: float
    answer_tokens: int
    instruction: str
    replay: float
    lm_weight: float
    holdout: float
    publish: Literal["if_learned", "always"]


def rows_of(data: Iterable[Mapping[str, Any]], field: str = "data") -> list[dict[str, Any]]:
    """Return the rows as dicts. Raises `InvalidRequest` for anything that is not a row."""
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise InvalidRequest(f"expected a list of rows, got one {type(data).__name__}", field=field)
    if hasattr(data, "iterrows"):  # a DataFrame of pandas; its NaN becomes null, which counts as absent
        data = msgspec.json.decode(cast("Any", data).to_json(orient="records"))
    rows = list[dict[str, Any]]()
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise InvalidRequest(f"expected a mapping, got {type(row).__name__}", field=f"{field}[{number}]")
        rows.append(dict(row))
    return rows


def check_header(value: str, field: str) -> None:
    """Raise `InvalidRequest` for a text that is not valid as a header's value."""
    if not isinstance(value, str):
        raise InvalidRequest(f"expected str, got {type(value).__name__}", field=field)
    if not (value.isascii() and value.isprintable() and value.strip() == value != ""):
        raise InvalidRequest("expected printable ASCII without spaces around it", field=field)


def encode_body(body: msgspec.Struct) -> bytes:
    """Return the body as JSON. Raises `InvalidRequest` for a value without a JSON form: NaN, for example, would become
    null, which means the default."""
    for name in body.__struct_fields__:
        if name != "data":  # `corpus_body` has checked the rows
            check(getattr(body, name), name)
    return encode(body)


def corpus_body(
    request: FinetuneRequest,
    file: Path | str | bytes | None,
    validation: Iterable[Mapping[str, Any]] | Path | str | None,
) -> FinetuneRequest | Upload:
    """Return the request as it is, or an `Upload` if the corpus is a file, has too many rows for a JSON body, or comes
    with rows for validation. Raises as `encode_body` and `corpus_upload`."""
    if file is None and request.data is not None:
        rows = _row_lines(request.data, "data")
        if validation is None and len(rows) <= MAX_INLINE_BYTES:
            return request
        file, request = rows, msgspec.structs.replace(request, data=None)
    if file is None:
        if validation is not None:
            raise InvalidRequest("expected data or file beside validation", field="validation")
        return request
    upload = corpus_upload(request, file)
    if validation is None:
        return upload
    held: Path | str | bytes
    if isinstance(validation, str | Path):
        held = validation
    else:
        held = _row_lines(rows_of(validation, "validation"), "validation")
    return replace(upload, validation=_content(held, "validation"))


def _row_lines(rows: list[dict[str, Any]], field: str) -> bytes:
    """Return rows as JSON Lines. Raises `InvalidRequest` for a value without a JSON form."""
    check(rows, field)
    return b"".join(encode(row, f"{field}[{number}]") + b"\n" for number, row in enumerate(rows))


def corpus_upload(request: FinetuneRequest, file: Path | str | bytes) -> Upload:
    """Return the upload of settings and a corpus, given as a file's path or content. Raises `InvalidRequest` for a path
    that is not a file."""
    return Upload(encode_body(request), (("corpus", _content(file, "file")),))


def _content(file: Path | str | bytes, field: str) -> Path | bytes:
    if isinstance(file, bytes):
        return file
    if not (path := Path(file)).is_file():
        found = "a folder" if path.is_dir() else "no regular file" if path.exists() else "nothing there"
        raise InvalidRequest(f"expected a file, got {str(path)!r}: {found}", field=field)
    return path


def document_file(file: Path | str | bytes | Iterable[Path | str]) -> Path | bytes:
    """Return what is uploaded of a document: a file as it is, the text of several and of folders. Raises
    `InvalidRequest`, and as `read_document`."""
    if isinstance(file, bytes):
        return file
    paths = [Path(file)] if isinstance(file, str | Path) else [Path(each) for each in file]
    if not paths:
        raise InvalidRequest("expected a file or a folder, got none", field="file")
    if len(paths) == 1 and not paths[0].is_dir():
        refuse_rows(paths[0])
        return _content(paths[0], "file")
    return read_document(*paths).encode()


def cut_warning(job: Job) -> str | None:
    """Return a warning about truncated rows; None if there are none."""
    if not job.rows_cut:
        return None
    limit = "micro_batch_tokens" if job.training.loss is None else "half of micro_batch_tokens"
    rows = f"{job.rows_cut} of {job.rows} row{'' if job.rows == 1 else 's'}"
    return (
        f"{rows} {'was' if job.rows_cut == 1 else 'were'} too long and lost a part (the limit is the smallest of "
        f"max_length, the base's context and {limit})"
    )


def adapter_upload(name: str, source: Path) -> Upload:
    """Return the upload of a PEFT folder's two files, or of an archive of them. Raises `InvalidRequest` if one is
    missing."""
    settings = encode_body(ImportRequest(name=name))
    if source.is_file():
        return Upload(settings, ((source.name, source),))
    if not source.is_dir():
        got = f"got {str(source)!r}, where there is neither"
        raise InvalidRequest(f"expected a folder of PEFT files or an archive, {got}", field="folder")
    for file in ADAPTER_FILES:
        if not (source / file).is_file():
            got = ", ".join(sorted(entry.name for entry in source.iterdir())[:8]) or "nothing"
            raise InvalidRequest(f"expected a file {file!r} in the folder, got {got[:300]}", field="folder")
    return Upload(settings, tuple((file, source / file) for file in ADAPTER_FILES))


def as_struct(value: object, type: type[T], field: str) -> T:
    """Return a struct, or convert an equivalent mapping to it. Raises `InvalidRequest` with the path of the wrong
    field."""
    if isinstance(value, type):
        return value
    named = with_own_names(value, fields_of(type)) if isinstance(value, Mapping) else value
    try:
        return msgspec.convert(named, type=type)
    except msgspec.ValidationError as error:
        wrong = explain(error, named, type)
        path = field if wrong.field is None else f"{field}.{wrong.field}"
        raise InvalidRequest(f"{path}: {wrong.message}", field=path) from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field}: expected valid UTF-8, got a lone surrogate", field=field) from None
