"""Tinker's protobuf messages: what its SDK sends as `forward_backward`, and reads as results. Built from tables, since
the wire has only field numbers; the tests compare them with the SDK's own definitions.

Letters: N tokens, K candidates of a target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from coserve.core.errors import InvalidRequest, UnsupportedEncoding

PROTOBUF = "application/x-protobuf"
MAX_EXPANDED = 64 << 20
"""Most bytes of a compressed body once it is decompressed."""
MAX_DENSE = 1 << 24
"""Most entries of all sparse arrays of a request together, zeros included."""
Array = npt.NDArray[Any]

_MESSAGES: dict[str, tuple[str, ...]] = {
    "SparseCsr": ("values:bytes", "crow_indices:bytes", "col_indices:bytes"),
    "Tensor": ("dense:bytes", "sparse_csr:SparseCsr", "dtype:enum", "*shape:int64"),
    "BatchedTensor": ("data:bytes", "offsets:bytes", "dtype:enum", "*trailing_shape:int64"),
    "Field": ("key:string", "value:BatchedTensor"),
    "ArrayRecord": ("type_tag:string", "*fields:Field", "num_datums:int64"),
    "Metric": ("key:string", "value:double"),
    "ForwardBackwardOutput": ("loss_fn_output_type:string", "*loss_fn_outputs:ArrayRecord", "*metrics:Metric"),
    "EncodedTextChunk": ("tokens:bytes",),
    "Other": (),
    "Chunk": ("encoded_text:EncodedTextChunk", "image:Other", "dmel:Other"),
    "Input": ("key:string", "value:Tensor"),
    "Datum": ("*model_input:Chunk", "*loss_fn_inputs:Input"),
    "Number": ("number:double", "text:string"),
    "Option": ("key:string", "value:Number"),
    "ForwardBackwardRequest": (
        "model_id:string",
        "seq_id:int32",
        "*data:Datum",
        "loss_fn:string",
        "*loss_fn_config:Metric",
        "forward_only:bool",
        "*loss_fn_config_v2:Option",
    ),
    "TopkLogprobs": ("token_ids:bytes", "logprobs:bytes", "k:uint32", "length:uint32"),
    "SampledSequence": ("stop_reason:enum", "tokens:bytes", "logprobs:bytes", "topk_sampled_logprobs:TopkLogprobs"),
    "SampleResponse": (
        "*sequences:SampledSequence",
        "prompt_logprobs:bytes",
        "topk_prompt_logprobs:TopkLogprobs",
        "prompt_cache_hit_tokens:int32",
    ),
}
"""Fields in the order of their numbers, from 1; `*`: repeated. A map is a repeated message of key and value, and an
enum is an integer, which the wire cannot tell apart."""
_DTYPES: dict[int, type[np.generic]] = {1: np.float32, 2: np.int64, 3: np.int32}
FLOAT32 = 1
EMPTY = -99999.0
"""Log-probability in an empty place of a table, as in the SDK."""


def _message(name: str) -> Any:  # noqa: ANN401 - protobuf makes classes at run time
    """Return a message's class. Raises `InvalidRequest` without protobuf."""
    return _classes()[f"coserve.{name}"]


@cache
def _classes() -> Mapping[str, Any]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise InvalidRequest("the Tinker API needs protobuf and zstandard: pip install 'coserve[tinker]'") from None
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="coserve_tinker.proto", package="coserve", syntax="proto3")
    for own, fields in _MESSAGES.items():
        message = file.message_type.add(name=own)
        for number, text in enumerate(fields, 1):
            field, kind = text.removeprefix("*").split(":")
            scalar = "int32" if kind == "enum" else kind
            message.field.add(
                name=field,
                number=number,
                label=kinds.LABEL_REPEATED if text.startswith("*") else kinds.LABEL_OPTIONAL,
                type=kinds.TYPE_MESSAGE if kind in _MESSAGES else kinds.Type.Value(f"TYPE_{scalar.upper()}"),
                type_name=f".coserve.{kind}" if kind in _MESSAGES else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found: Mapping[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return found


def expanded(body: bytes, encoding: str) -> bytes:
    """Return a body without its `Content-Encoding`: none, or zstd. Raises `UnsupportedEncoding`, `InvalidRequest`."""
    if not encoding:
        return body
    if encoding != "zstd":
        raise UnsupportedEncoding(f"expected zstd, got {encoding[:80]!r}", field="Content-Encoding")
    try:
        import zstandard
    except ImportError:
        raise UnsupportedEncoding("zstd needs zstandard: pip install 'coserve[tinker]'") from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            found: bytes = reader.read(MAX_EXPANDED + 1)
    except zstandard.ZstdError:
        raise InvalidRequest("the body is not zstd") from None
    if len(found) > MAX_EXPANDED:
        raise InvalidRequest(f"expected a body of at most {MAX_EXPANDED} bytes without compression")
    return found


def parsed_request(body: bytes) -> Any:  # noqa: ANN401
    """Return a `ForwardBackwardRequest`, on any thread. Raises `InvalidRequest` for what is no such message."""
    from google.protobuf.message import DecodeError

    try:
        return _message("ForwardBackwardRequest").FromString(body)
    except DecodeError:
        raise InvalidRequest("the body is no ForwardBackwardRequest") from None


def config_of(request: Any) -> dict[str, float]:  # noqa: ANN401
    """Return the settings of a request's loss. Raises `InvalidRequest`."""
    config = {option.key: option.value for option in request.loss_fn_config}
    for option in request.loss_fn_config_v2:
        if option.value.text:
            raise InvalidRequest(f"expected a number, got {option.value.text[:80]!r}", field=option.key[:80])
        config[option.key] = option.value.number
    return config


def data_of(request: Any) -> list[tuple[Array, dict[str, Array]]]:  # noqa: ANN401
    """Return the tokens (N) of each datum, and the arrays of its `loss_fn_inputs`. Raises `InvalidRequest`."""
    inputs = [each.value for datum in request.data for each in datum.loss_fn_inputs]
    if sum(abs(math.prod(tensor.shape)) for tensor in inputs if tensor.HasField("sparse_csr")) > MAX_DENSE:
        raise InvalidRequest(f"expected at most {MAX_DENSE} entries of sparse arrays", field="data")
    return [_datum(datum) for datum in request.data]


def _datum(message: Any) -> tuple[Array, dict[str, Array]]:  # noqa: ANN401
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise InvalidRequest("expected chunks of tokens: images and audio are not supported", field="model_input")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, "model_input"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return tokens, {each.key: _tensor(each.value, each.key) for each in message.loss_fn_inputs}


def _tensor(message: Any, name: str) -> Array:  # noqa: ANN401
    """Return an array; entries that a sparse one does not list are 0."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidRequest(f"expected float32 or int64, got type {message.dtype}", field=name)
    shape = tuple(message.shape)
    if not message.HasField("sparse_csr"):
        found = _array(message.dense, dtype, name)
        return _shaped(found, shape or found.shape, name)
    values = _array(message.sparse_csr.values, dtype, name)
    rows = _array(message.sparse_csr.crow_indices, np.int64, name)
    columns = _array(message.sparse_csr.col_indices, np.int64, name)
    if len(shape) != 2 or min(shape) < 1 or len(rows) != shape[0] + 1:
        raise InvalidRequest("expected a matrix in CSR", field=name)
    lengths = np.diff(rows)
    fits = lengths.min(initial=0) >= 0 and lengths.sum() == len(values) == len(columns) and not rows[0]
    if not fits or (columns.size and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise InvalidRequest("expected a matrix in CSR", field=name)
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), lengths), columns] = values
    return dense


def _array(data: bytes, dtype: type[np.generic], name: str) -> Array:
    if len(data) % np.dtype(dtype).itemsize:
        raise InvalidRequest(f"expected whole numbers of {np.dtype(dtype).itemsize} bytes", field=name)
    return np.frombuffer(data, dtype)


def _shaped(array: Array, shape: tuple[int, ...], name: str) -> Array:
    if min(shape, default=0) < 0 or np.prod(shape, dtype=object) != array.size:
        raise InvalidRequest(f"expected {array.size} numbers in its shape, got {shape}", field=name)
    return array.reshape(shape)


def encode_forward_backward(log_probs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Encode a `ForwardBackwardOutput`. `log_probs`: of the targets of each datum, (N) or (N, K), fp32."""
    message = _message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for key, value in metrics.items():
        message.metrics.add(key=key, value=value)
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(log_probs))
    trailing = log_probs[0].shape[1:] if log_probs else ()
    record.fields.add(key="logprobs").value.CopyFrom(
        _message("BatchedTensor")(
            data=b"".join(each.tobytes() for each in log_probs),
            offsets=np.array([0, *accumulate(each.nbytes for each in log_probs)], np.int64).tobytes(),
            dtype=FLOAT32,
            trailing_shape=trailing,
        )
    )
    found: bytes = message.SerializeToString()
    return found


Top = Sequence[Sequence[tuple[int, float]]]
"""For each position, the most likely tokens and their log-probabilities."""


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence."""

    stopped: bool
    """False: it ended for its length."""
    tokens: Sequence[int]
    log_probs: Sequence[float]
    top: Top | None = None


def encode_samples(
    sequences: Sequence[Sampled], prompt: Sequence[float] | None, prompt_top: Top | None, cached: int
) -> bytes:
    """Encode a `SampleResponse`. `prompt`: log-probabilities of its tokens, NaN where there is none. `cached`: tokens
    of the prompt that the prefix cache had."""
    message = _message("SampleResponse")(prompt_cache_hit_tokens=cached)
    for each in sequences:
        sequence = message.sequences.add(
            stop_reason=0 if each.stopped else 1,
            tokens=np.array(each.tokens, np.int32).tobytes(),
            logprobs=np.array(each.log_probs, np.float32).tobytes(),
        )
        if each.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top(each.top))
    if prompt is not None:
        message.prompt_logprobs = np.array(prompt, np.float32).tobytes()
    if prompt_top is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(prompt_top))
    found: bytes = message.SerializeToString()
    return found


def _top(rows: Top) -> Any:  # noqa: ANN401
    """Encode a table; positions with fewer tokens are filled with token 0 and `EMPTY`."""
    width = max(map(len, rows), default=0)
    ids, values = np.zeros((len(rows), width), np.int32), np.full((len(rows), width), EMPTY, np.float32)
    for number, row in enumerate(rows):
        for place, (token, value) in enumerate(row):
            ids[number, place], values[number, place] = token, value
    return _message("TopkLogprobs")(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=width, length=len(rows))
