"""Tinker's `forward_backward` as the engine takes it, and its result. A large one is decoded in a helper process, as
protobuf holds the interpreter's lock from start to end."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from coserve.api.tinker.wire import Array, config_of, data_of, encode_forward_backward, parsed_request
from coserve.core.errors import InvalidRequest
from coserve.core.training.schemas import Compute
from coserve.data.corpus.batch import Example, examples_out
from coserve.data.offload.protocol import Failure, failure_of

INPUTS = {
    "weights": "weights_K",
    "logprobs": "sampled_K",
    "advantages": "advantages_K",
    "sequence_ratio_mask": "ratio_mask_K",
}
"""Maps names in Tinker's `loss_fn_inputs` to fields of `Example`."""
NAMES = {"labels": "target_tokens"} | {field.removesuffix("_K"): name for name, field in INPUTS.items()}
"""Maps field names in the engine's errors to Tinker's names."""


class DecodedCall(msgspec.Struct, frozen=True):
    """A `ForwardBackwardRequest` as the engine takes it. `error`: why its data is invalid, and `compute` has none of
    it; the request still takes its turn."""

    model_id: str
    seq_id: int
    compute: Compute
    shapes: list[list[int]]
    """Shapes of the targets, by datum."""
    error: Failure | None


def decode_call(body: bytes) -> DecodedCall:
    """Decode a request. Raises `InvalidRequest` for what is no such message."""
    request, config, examples, error = parsed_request(body), dict[str, float](), list[Example](), None
    try:
        config = config_of(request)
        examples = [_example(number, *datum) for number, datum in enumerate(data_of(request))]
    except InvalidRequest as wrong:
        error = failure_of(wrong)
    compute = Compute(examples_out(examples), request.loss_fn, config, not request.forward_only)
    shapes = [list(example.labels_K.shape) for example in examples]
    return DecodedCall(request.model_id, request.seq_id, compute, shapes, error)


def _example(number: int, tokens: Array, given: dict[str, Array]) -> Example:
    labels = given.pop("target_tokens", None)
    if labels is None or len(labels) != len(tokens):
        got = "none" if labels is None else len(labels)
        raise InvalidRequest(f"datum {number}: expected {len(tokens)} target_tokens, got {got}", field="data")
    if unknown := given.keys() - INPUTS.keys():
        known = ", ".join(("target_tokens", *INPUTS))
        raise InvalidRequest(f"datum {number}: expected {known}, got {min(unknown)[:80]!r}", field="data")
    values: dict[str, Any] = {INPUTS[name]: array.astype(np.float32) for name, array in given.items()}
    after = np.arange(len(labels))
    return Example(tokens.astype(np.int32), after, np.ascontiguousarray(labels.astype(np.int64)), **values)


def output_of(shapes: list[list[int]], values: bytes, metrics: dict[str, float]) -> bytes:
    """Return the `ForwardBackwardOutput`: log-probabilities of each datum's targets."""
    flat = np.frombuffer(values, np.float32)
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = [own.reshape(shape) for own, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]
    return encode_forward_backward(parts, metrics)
