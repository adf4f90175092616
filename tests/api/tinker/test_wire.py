"""Tinker's protobuf against the definitions of its SDK."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from zstandard import ZstdCompressor

from coserve.api.tinker.calls import decode_call
from coserve.api.tinker.wire import Sampled, encode_forward_backward, encode_samples, expanded
from coserve.core.errors import InvalidRequest, UnsupportedEncoding
from coserve.data.corpus.batch import examples_in
from coserve.data.offload.protocol import error_of
from tests.support.examples import examples

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def datum(tokens: int, candidates: int | None, *, sparse: bool = False) -> types.Datum:
    shape = (tokens,) if candidates is None else (tokens, candidates)
    labels = np.arange(np.prod(shape)).reshape(shape) % 3
    weights = labels.astype(np.float32) / 2 - 0.5
    if sparse:  # rows of one entry each, in the last column
        csr = {"sparse_crow_indices": list(range(tokens + 1)), "sparse_col_indices": [shape[1] - 1] * tokens}
        inputs = {"weights": types.TensorData(weights[:, -1], "float32", list(shape), **csr)}
    else:
        inputs = {"weights": types.TensorData.from_numpy(weights)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(tokens))).append_int(7),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.concatenate([labels, labels[:1]]))} | inputs,
    )


def encoded(data: list[types.Datum], **config: float | str) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config or None),
        model_id="m:train:0",
        seq_id=3,
    )
    return forward_backward_request_to_proto(request).SerializeToString()


@settings(max_examples=examples(20))
@given(lengths=LENGTHS, candidates=st.sampled_from([None, 1, 3]), beta=st.floats(0, 1, width=32))
def test_requests_of_the_sdk_are_read(lengths: list[int], candidates: int | None, beta: float) -> None:
    data = [datum(length, candidates) for length in lengths]
    found = decode_call(encoded(data, beta=beta))
    compute = found.compute
    assert (found.model_id, found.seq_id, compute.loss, compute.learns) == ("m:train:0", 3, "ppo", True)
    assert found.error is None and compute.config == {"beta": beta}
    for ours, theirs in zip(examples_in(compute.batch), data, strict=True):
        assert ours.tokens_N.tolist() == theirs.model_input.to_ints()
        np.testing.assert_array_equal(ours.labels_K, theirs.loss_fn_inputs["target_tokens"].to_numpy())
        np.testing.assert_array_equal(ours.weights_K, theirs.loss_fn_inputs["weights"].to_numpy())


def test_sparse_arrays_are_read() -> None:
    theirs = datum(3, 2, sparse=True)
    (ours,) = examples_in(decode_call(encoded([theirs])).compute.batch)
    np.testing.assert_array_equal(ours.weights_K, theirs.loss_fn_inputs["weights"].to_numpy())


def test_a_call_has_the_shape_of_the_engine() -> None:
    theirs = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array([6, 7])),
            "logprobs": types.TensorData.from_numpy(np.array([0.5, -1], np.float32)),
            "advantages": types.TensorData.from_numpy(np.array([0, 2], np.float32)),
        },
    )
    (example,) = examples_in(decode_call(encoded([theirs])).compute.batch)
    assert example.after_K.tolist() == [0, 1]
    assert example.labels_K.tolist() == [6, 7]
    assert example.sampled_K is not None and example.sampled_K.tolist() == [0.5, -1]
    assert example.advantages_K is not None and example.advantages_K.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("data", "config", "message"),
    [
        ([types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={})], {}, "target_tokens, got none"),
        ([datum(2, None)], {"mode": "x"}, "expected a number, got 'x'"),
        (
            [
                types.Datum(
                    model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]), loss_fn_inputs={}
                )
            ],
            {},
            "images and audio are not supported",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    data: list[types.Datum], config: dict[str, str], message: str
) -> None:
    refused = decode_call(encoded(data, **config)).error
    assert refused is not None and message in error_of(refused).message


def test_a_body_that_is_something_else_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no ForwardBackwardRequest"):
        decode_call(b"\xff\xff")


def test_bodies_may_be_compressed() -> None:
    assert expanded(ZstdCompressor().compress(b"abc"), "zstd") == b"abc"
    with pytest.raises(InvalidRequest, match="not zstd"):
        expanded(b"abc", "zstd")
    with pytest.raises(UnsupportedEncoding, match="expected zstd, got 'gzip'"):
        expanded(b"abc", "gzip")


@settings(max_examples=examples(20))
@given(lengths=LENGTHS, candidates=st.sampled_from([None, 2]))
def test_the_sdk_reads_outputs(lengths: list[int], candidates: int | None) -> None:
    shapes = [(length,) if candidates is None else (length, candidates) for length in lengths]
    ours = [np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in shapes]
    found = deserialize_forward_backward_output(encode_forward_backward(ours, {"loss:sum": 2.5}))
    assert found.metrics == {"loss:sum": 2.5}
    for theirs, array in zip(found.loss_fn_outputs, ours, strict=True):
        np.testing.assert_array_equal(theirs["logprobs"].to_numpy(), array)


def test_the_sdk_reads_samples() -> None:
    sequences = [Sampled(True, [3, 2], [-0.5, -1.0], [[(3, -0.5), (4, -2.0)], [(2, -1.0)]]), Sampled(False, [], [])]
    found = deserialize_sample_response(encode_samples(sequences, [np.nan, -0.25], [[], [(9, -0.25)]], 16))
    first, second = found.sequences
    assert (first.stop_reason, first.tokens, first.logprobs) == ("stop", [3, 2], [-0.5, -1.0])
    assert first.topk_logprobs == [[(3, -0.5), (4, -2.0)], [(2, -1.0)]]
    assert (second.stop_reason, second.tokens) == ("length", [])
    assert (found.prompt_logprobs, found.prompt_cache_hit_tokens) == ([None, -0.25], 16)
    assert found.topk_prompt_logprobs == [None, [(9, -0.25)]]


def test_sparse_arrays_do_not_expand_without_bound() -> None:
    wide = types.TensorData([1.0], "float32", [1, 1 << 23], sparse_crow_indices=[0, 1], sparse_col_indices=[5])
    one = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"weights": wide})
    alone = decode_call(encoded([one])).error
    assert alone is not None and "target_tokens, got none" in error_of(alone).message
    refused = decode_call(encoded([one] * 3)).error
    assert refused is not None and "entries of sparse arrays" in error_of(refused).message


def test_targets_without_a_candidate_are_refused() -> None:
    none = {"target_tokens": types.TensorData([], "int64", [2, 0]), "weights": types.TensorData([], "float32", [2, 0])}
    one = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=none)
    compute = decode_call(encoded([one])).compute
    with pytest.raises(InvalidRequest, match="row of candidates"):
        examples_in(compute.batch)[0].check(vocab=100)
