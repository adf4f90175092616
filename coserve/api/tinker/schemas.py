"""JSON bodies of Tinker's API, as its SDK 0.25 to 0.38 sends and reads them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from coserve.core.errors import InvalidRequest
from coserve.core.limits import MAX_TOKENS, LogprobCount, Seed, TokenId
from coserve.core.training.schemas import OptimStepRequest

Name = Annotated[str, Meta(max_length=256)]
Metadata = Annotated[dict[str, Any], Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Category = Literal["user", "server"]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Base of the requests. `type` repeats the route."""

    type: Name = ""


class TinkerConfigRequest(Body, frozen=True):
    sdk_version: Name = ""


class TinkerConfig(msgspec.Struct, frozen=True):
    """Settings of the SDK, which it reads once."""

    create_model_via_load_weights: bool = True
    """A model that continues a saved state is created from it in one request, not created first and then replaced."""
    proto_write_fwdbwd: bool = True
    parallel_fwdbwd_chunks: bool = True


class TinkerDynamicConfig(msgspec.Struct, frozen=True):
    """Settings of the SDK, which it reads again from time to time."""

    sample_cancel_enabled: bool = True


class CreateSession(Body, frozen=True):
    tags: Annotated[list[Name], Meta(max_length=64)] = []
    user_metadata: Metadata | None = None
    sdk_version: Name = ""
    project_id: Name | None = None
    display_name: Annotated[str, Meta(max_length=1024)] | None = None


class TinkerSession(msgspec.Struct, frozen=True):
    session_id: str
    type: str = "create_session"
    info_message: str | None = None


class OfSession(Body, frozen=True):
    session_id: Name


class Heartbeat(msgspec.Struct, frozen=True):
    type: str = "session_heartbeat"


class FinishSession(Body, frozen=True):
    reason: Metadata | None = None
    detail: Annotated[str, Meta(max_length=65536)] | None = None


class TinkerLora(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    rank: Count = 32
    seed: Seed | None = None
    train_unembed: bool = True
    """Ignored, and the session says so: adapters of coserve have no unembedding."""
    train_mlp: bool = True
    train_attn: bool = True


class TinkerOptimizer(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body, frozen=True):
    session_id: Name
    model_seq_id: Count
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: TinkerLora | None = None
    optimizer_config: TinkerOptimizer | None = None


class OfModel(Body, frozen=True):
    model_id: Name


class Numbered(msgspec.Struct, frozen=True):
    """Fields that are read from a model's request even if the rest of it is invalid."""

    model_id: Name
    seq_id: Count


def numbered(body: bytes) -> Numbered:
    """Decode a request that may be invalid, also by having NaN. Raises `InvalidRequest` without those fields."""
    try:
        return msgspec.convert(json.loads(body), Numbered)
    except (ValueError, RecursionError):
        raise InvalidRequest("expected a number of the request") from None


class OptimStep(OfModel, frozen=True):
    adam_params: OptimStepRequest
    seq_id: Count | None = None


class SaveWeights(OfModel, frozen=True):
    path: Name | None = None
    """Name of the state."""
    seq_id: Count | None = None
    ttl_seconds: Count | None = None
    """Ignored: states stay until they are deleted."""
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(OfModel, frozen=True):
    path: Name | None = None
    """Name under which the weights are published as an adapter. null: they are kept in the engine's memory alone."""
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot"] = "snapshot"
    seq_id: Count | None = None
    ttl_seconds: Count | None = None
    """Ignored: adapters stay until they are deleted."""
    user_metadata: Metadata | None = None


class LoadWeights(Body, frozen=True):
    path: Name
    optimizer: bool
    """Whether moments and step count are loaded too."""
    model_id: Name | None = None
    seq_id: Count | None = None
    session_id: Name | None = None
    model_seq_id: Count | None = None
    base_model: Name | None = None
    user_metadata: Metadata | None = None
    optimizer_config: TinkerOptimizer | None = None


class CreateSamplingSession(OfSession, frozen=True):
    sampling_session_seq_id: Count
    base_model: Name | None = None
    model_path: Name | None = None


class TokenChunk(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    type: Literal["encoded_text"] = "encoded_text"


class TinkerPrompt(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    chunks: Annotated[list[TokenChunk], Meta(max_length=MAX_TOKENS)]


class TinkerSampling(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    seed: Seed | None = None
    stop: (
        Annotated[str, Meta(min_length=1, max_length=256)] | Annotated[list[TokenId | Name], Meta(max_length=16)] | None
    ) = None
    """Texts or token ids; an empty list: generation continues past the base's EOS tokens."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class TinkerSample(Body, frozen=True):
    prompt: TinkerPrompt
    sampling_params: TinkerSampling
    num_samples: Annotated[int, Meta(ge=1, le=128)] = 1
    base_model: Name | None = None
    model_path: Name | None = None
    sampling_session_id: Name | None = None
    seq_id: Annotated[int, Meta(ge=0)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: LogprobCount = 0
    topk_sample_logprobs: LogprobCount = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


class RetrieveFuture(Body, frozen=True):
    request_id: Name
    allow_metadata_only: bool = False


class TinkerFuture(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that was accepted."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class TryAgain(msgspec.Struct, frozen=True):
    """A result that is not there yet."""

    request_id: str
    queue_state: Literal["active", "paused_capacity"]
    queue_state_reason: str | None = None
    type: str = "try_again"


class TinkerError(msgspec.Struct, frozen=True):
    """The error of a response, or of a request whose result is retrieved."""

    error: str
    category: Category


class ModelResult(msgspec.Struct, frozen=True):
    """Result of `create_model` and `unload_model`."""

    model_id: str
    type: str


class PathResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of `save_weights`, `load_weights` and `save_weights_for_sampler`."""

    path: str | None = None
    model_id: str | None = None
    sampling_session_id: str | None = None


class StepResult(msgspec.Struct, frozen=True):
    metrics: dict[str, float]


class SamplingSession(msgspec.Struct, frozen=True):
    sampling_session_id: str
    type: str = "create_sampling_session"


class Sampler(msgspec.Struct, frozen=True):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class ModelData(msgspec.Struct, frozen=True):
    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfo(msgspec.Struct, frozen=True):
    model_id: str
    model_data: ModelData
    model_name: str
    lora_rank: int
    is_lora: bool = True
    type: str = "get_info"


class SupportedModel(msgspec.Struct, frozen=True):
    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class Capabilities(msgspec.Struct, frozen=True):
    supported_models: list[SupportedModel]


class TinkerHealth(msgspec.Struct, frozen=True):
    status: str = "ok"


class Accepted(msgspec.Struct, frozen=True):
    status: str = "accepted"


class WeightsPath(Body, frozen=True):
    tinker_path: Name


class WeightsInfo(msgspec.Struct, frozen=True):
    """Base and LoRA settings of a saved state."""

    base_model: str
    lora_rank: int
    is_lora: bool = True
    train_unembed: bool = False
    train_mlp: bool = True
    train_attn: bool = True


class TinkerCheckpoint(msgspec.Struct, frozen=True):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: str
    tinker_path: str


class TinkerCheckpoints(msgspec.Struct, frozen=True):
    checkpoints: list[TinkerCheckpoint]
