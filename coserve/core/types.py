"""Data types that all packages share. No torch, no IO.

Structs are sent over HTTP or the link to the engine; they are frozen and refuse unknown fields. Times are seconds
(`float`) on the clock of the process that made them; token ids are `int`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coserve.core.limits import MAX_MESSAGES, MAX_NAMES, BlockNames, ModuleName, ModuleNames, Text, TrainedTokens
from coserve.core.messages import ChatMessage
from coserve.core.names import end_of
from coserve.core.sampling import SamplingFields


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of structs that are sent or stored."""


class AdapterRef(msgspec.Struct, frozen=True, order=True):
    """One immutable version of one adapter. Each KV page and cached prefix belongs to one version, or to the base."""

    id: str
    version: int

    def __str__(self) -> str:
        return f"{self.id}@{self.version}"


class AdapterDigests(msgspec.Struct, frozen=True):
    """SHA-256 (hex) of an adapter's files, and the alphas resolved from its config, as the registry stores them."""

    weights: str
    config: str = ""
    """Empty for versions registered before this field existed; then it is not checked."""
    alphas: tuple[float, ...] | None = None
    """Alpha of each adapted module, ordered by module name; empty: `lora_alpha` for all. None: not stored (an older
    registration), so the config's patterns are matched when the files are read."""


Halves = Literal["", "concatenated", "interleaved"]


class SiteSpec(msgspec.Struct, frozen=True):
    """One linear module of the base that an adapter may change."""

    in_features: int
    out_features: int
    layer: int
    experts: int = 1
    """Experts of a fused parameter of a mixture of experts, each with these features; 1: a linear module."""
    chosen: int = 1
    """Experts that compute a token."""
    transposed: bool = False
    """Whether the parameter is (experts, in, out) instead of (experts, out, in)."""
    halves: Halves = ""
    """How the parameter's outputs hold gate and up; empty: it is no fused gate and up."""
    by_expert: bool = False
    """Whether each of several GPUs has some experts whole, instead of a part of each."""


class BaseSpec(Wire, frozen=True):
    """Description of the loaded base, for code that does not hold the model."""

    name: str
    fingerprint: str
    family: str
    dtype: str
    device: str
    layers: int
    hidden: int
    vocab: int
    context: int
    eos_token_ids: tuple[int, ...]
    sites: dict[str, SiteSpec]
    """The linear modules of decoder layers."""
    default_targets: tuple[str, ...]
    """Suffixes of the sites that a new adapter targets by default: all linear sites of a layer."""
    context_note: str = ""
    """Why `context` is less than the model's own maximum; empty if it is not."""
    hub_name: str | None = None
    """NAME or OWNER/NAME on the hub; None: the base is bundled or was read from a folder."""
    experts: dict[str, SiteSpec] = {}
    """The fused parameters of experts that an adapter may change, by name."""
    quantization: str = "none"
    """How the linear modules of the layers are stored: fp8, nf4 or none. The fingerprint is of the weights before."""
    ends: dict[str, SiteSpec] = {}
    """The embedding (layer -1, tokens to features) and the head (layer `layers`); empty on several GPUs."""
    tied: bool = False
    """Whether embedding and head are one weight."""
    kv_heads: int = 0
    prefixes: dict[str, SiteSpec] = {}
    """Each layer's keys and values, of `kv_heads` heads, as a cartridge may precede them; empty: it cannot."""

    def site(self, name: str) -> SiteSpec:
        """Return the linear module, parameter, end, or layer's keys and values of this name."""
        return self.sites.get(name) or self.experts.get(name) or self.ends.get(end_of(name)) or self.prefixes[name]


class SamplingParams(SamplingFields, frozen=True, kw_only=True):
    """How to sample tokens. `seed` is always set when the engine gets it.

    Stop strings are handled in the API process, which has the text; the engine knows only `stop_token_ids`.
    """

    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens. With `max_tokens` 0 the prompt is scored and nothing is generated."""
    seed: int = 0


class Slo(Wire, frozen=True):
    """A request's latency targets, in seconds. `e2e`: from arrival to the last token."""

    ttft: float
    tpot: float
    e2e: float | None = None
    batch: bool = False
    """The request's class is `batch`: interactive requests are admitted first. After
    `queues.inference.INTERACTIVE_PER_BATCH` of them, a batch request goes next if its first token is due before
    theirs."""
    shed: bool = False
    """Refuse the request as soon as its first token cannot be on time."""
    shed_e2e: bool = False
    """Refuse the request as soon as its last token cannot be on time."""


SloClass = Literal["interactive", "batch"]
"""Classes of requests. Each has its own latency targets in the settings."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class MicroStep(StrEnum):
    """Kinds of micro-steps. A micro-step is a piece of a training micro-batch that runs without interruption. Within a
    job, micro-steps of one kind take about the same time."""

    BEGIN = "begin"
    """Pack and embed rows, and run the first layer's forward."""
    FORWARD = "forward"
    """One layer's forward."""
    HEAD = "head"
    """Logits, loss and its gradient, for a chunk of the target tokens."""
    BACKWARD = "backward"
    """One layer's backward."""
    OPTIMIZER = "optimizer"
    """The update of the weights, one micro-step per optimizer step; with paged moments one per
    `admission.optimizers.SLICE` of it, and with DoRA one more per `finetune.optimizer.SITES_AT_ONCE` sites."""
    EVALUATE = "evaluate"
    """One layer's forward without gradients, for an evaluation or a teacher."""
    EVALUATE_HEAD = "evaluate_head"
    RESULT = "result"
    """The host reads the results of earlier micro-steps and continues with them. Used only if slices overlap
    generation; otherwise the preceding micro-step does it."""


class Optimizer(StrEnum):
    """A job's optimizer: AdamW (decoupled weight decay) or Lion. `8bit`: one-byte moments, by bitsandbytes. `paged`:
    the moments stay in host memory and pass through the GPU at each update."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    LION = "lion"
    LION_8BIT = "lion_8bit"
    PAGED_ADAMW = "paged_adamw"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_LION = "paged_lion"
    PAGED_LION_8BIT = "paged_lion_8bit"

    @property
    def paged(self) -> bool:
        return self.startswith("paged_")

    @property
    def unpaged(self) -> Optimizer:
        """Return the optimizer with its moments on the GPU. Its checkpoints are interchangeable with this one's."""
        return Optimizer(self.removeprefix("paged_"))

    @property
    def eight_bit(self) -> bool:
        return self.unpaged in (Optimizer.ADAMW_8BIT, Optimizer.LION_8BIT)

    @property
    def lion(self) -> bool:
        return self.unpaged in (Optimizer.LION, Optimizer.LION_8BIT)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of the chosen token, and `(token, logprob)` of the most likely tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Schedule(StrEnum):
    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


DEFAULT_RANK = 16
"""LoRA rank of a new adapter by default. Memory is profiled with it, and its kernels are compiled first."""


class LoraRequest(Wire, frozen=True):
    """The shape of a new adapter as a user requests it, with PEFT's meanings.

    Some names differ from PEFT's: `alpha` is `lora_alpha`, `rslora` is `use_rslora`, `dropout` is `lora_dropout`,
    `targets` is `target_modules`, `init` is `init_lora_weights`, and `bd_blocks`, `targets_bd_a` and `targets_bd_b` are
    `use_bdlora`'s `nblocks`, `target_modules_bd_a` and `target_modules_bd_b`.
    """

    r: int = DEFAULT_RANK
    """LoRA rank of a new adapter."""
    alpha: float | None = None
    """The adapter's scale is `alpha / r`. None: `2 * r`."""
    rslora: bool = False
    use_dora: bool = False
    """DoRA (https://arxiv.org/abs/2402.09353): also learn the norm of each row of the adapted weight."""
    dropout: float = 0.0
    targets: ModuleNames | None = None
    """Suffixes of module names (`"q_proj"`) or whole names; None: every linear site of the decoder layers, or none with
    `target_parameters`."""
    target_parameters: ModuleNames | None = None
    """Suffixes of the names of experts' fused parameters (`"mlp.experts.gate_up_proj"`), as in PEFT: each expert gets a
    LoRA of its own."""
    rank_pattern: Annotated[dict[ModuleName, int], Meta(max_length=MAX_NAMES)] = {}
    alpha_pattern: Annotated[dict[ModuleName, float], Meta(max_length=MAX_NAMES)] = {}
    init: Annotated[str, Meta(max_length=64)] = "default"
    """`default` (Kaiming A, zero B), `gaussian` (normal A / r, zero B) or `orthogonal`."""
    bd_blocks: int = 1
    """BD-LoRA: number of diagonal blocks of B at column-parallel sites (q, k, v, gate, up) and of A at row-parallel
    ones (o, down). It suits tensor parallelism over that many GPUs or any divisor. `r` is the total rank of all blocks.
    1: plain LoRA."""
    targets_bd_a: BlockNames | None = None
    """Substrings of names of sites with a block-diagonal A; in neither list: plain LoRA. Both None: row-parallel."""
    targets_bd_b: BlockNames | None = None
    """Substrings of the names of sites with a block-diagonal B. If both lists are None: the column-parallel sites."""
    trainable_token_indices: TrainedTokens | None = None
    """Tokens whose rows of `embed_tokens` or `lm_head` are learned, as in PEFT: if tied, `embed_tokens` means both."""


class LoraSettings(LoraRequest, frozen=True):
    """The shape of an adapter: a `LoraRequest` without limits on names, as imported ones may list thousands."""

    targets: tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    targets_bd_a: tuple[str, ...] | None = None
    targets_bd_b: tuple[str, ...] | None = None
    cartridge: bool = False
    """The adapter is a KV prefix of `r` tokens, and has no LoRA matrices."""
    modules_to_save: tuple[str, ...] | None = None
    """Ends that an imported adapter replaces as a whole, by name; it can be served and not trained."""


Auto = Literal["auto"]
"""The daemon chooses the value from the size of the corpus and of the base (`data/corpus/defaults.py`)."""

TrainOn = Literal["completion", "all", "assistant"]
"""The tokens of a row that enter the loss."""


class DpoLoss(Wire, frozen=True):
    """Direct preference optimization (Rafailov et al. 2023, equation 7)."""

    type: Literal["dpo"]
    beta: float = 0.1
    """Scale of the rewards: how strongly the adapter is held to the reference."""
    reference: Literal["start", "base"] = "start"
    """Reference policy of the loss: the adapter at the job's start (the base, if the adapter is new), or the base."""


class TrainingRequest(Wire, frozen=True):
    """Training settings as a user requests them. At most one of `epochs` and `steps`; batches are counted in tokens.

    The daemon chooses `epochs` (unless `steps` is given), `batch_tokens` and `learning_rate` if they are not given.
    """

    epochs: float | Auto | None = None
    """Passes over the corpus; may be fractional; None is "auto"."""
    steps: int | None = None
    """Optimizer steps, instead of `epochs`."""
    batch_tokens: int | Auto = "auto"
    """Tokens per optimizer step."""
    micro_batch_tokens: int | None = None
    """Tokens per forward and backward; None: as many as the memory plan allows, at most `batch_tokens`."""
    max_length: int | None = None
    """Longest sequence in tokens; None: the base's context."""
    learning_rate: float | Auto = "auto"
    """Peak learning rate of the schedule."""
    train_on: TrainOn | None = None
    """Tokens in the loss: `completion` is the completion or last answer only (prompt/completion rows and chats),
    `assistant` every message of the assistant (chats), `all` every token. None: all of a text, the completion of a
    prompt/completion row, every assistant message of a chat. Rows without such tokens are refused."""
    one_row_per_answer: bool = False
    """Split a chat into one row per answer to learn, each with the chat up to that answer: for templates that change
    earlier answers."""
    loss: DpoLoss | None = None
    """None: the negative log-likelihood of the target tokens. `dpo` needs rows of `prompt`, `chosen` and `rejected`."""
    schedule: Schedule = Schedule.LINEAR
    warmup_steps: int = 0
    optimizer: Optimizer = Optimizer.ADAMW
    """`adamw`; `lion` (https://arxiv.org/abs/2302.06675), which keeps one moment; `adamw_8bit` and `lion_8bit` with
    8-bit moments (https://arxiv.org/abs/2110.02861). Prefix `paged_`: the moments stay in pinned host memory."""
    beta1: float = 0.9
    beta2: float | None = None
    """None: 0.999, or 0.99 for Lion."""
    eps: float = 1e-8
    """Used by AdamW only."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """0: no clipping."""
    lora_plus_ratio: float | None = None
    """LoRA+ (https://arxiv.org/abs/2402.12354; PEFT's `loraplus_lr_ratio`): the learning rate of every B as a multiple
    of `learning_rate`, which then applies to A and must be given. At least 1; None: 1."""
    neftune_alpha: float | None = None
    """NEFTune (https://arxiv.org/abs/2310.05914; `neftune_noise_alpha` of transformers): adds uniform noise of at most
    alpha / sqrt(tokens of the row * hidden size) to the embeddings in training. None: no noise."""
    validation_split: float = 0.0
    """Fraction of the rows that is held back to measure the loss on."""
    validation_rows: int = 0
    """Rows at the corpus's end that are held back, instead of a fraction."""
    early_stopping_patience: int | None = None
    """Evaluations without improvement before the job ends; needs `validation_split` or `validation_rows`."""
    eval_steps: int = 20
    checkpoint_steps: int = 20
    seed: int = 0
    sample_prompts: Annotated[
        tuple[Text | Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_MESSAGES)], ...],
        Meta(max_length=MAX_MESSAGES),
    ] = ()
    """Texts, or chats as lists of messages. The adapter in training generates one sample for each, every `sample_steps`
    steps and at the end. Sampling does not affect the training."""
    sample_steps: int = 20
    """Optimizer steps between two samples."""
    sample_max_tokens: int = 128
    """Maximum tokens of a sample."""
    sample_temperature: float = 0.0
    """0: greedy. Above 0, samples are drawn with the job's `seed`."""


class TrainingSettings(TrainingRequest, frozen=True):
    """Training settings of a job: a `TrainingRequest` with every value resolved. A request may also be one."""

    epochs: float | None = None
    batch_tokens: int = 2048
    learning_rate: float = 2e-4
    beta2: float = 0.999

    @property
    def held_back(self) -> bool:
        """Return whether rows are held back to measure the loss on."""
        return bool(self.validation_split or self.validation_rows)


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    def can_become(self, other: JobState) -> bool:
        """Whether a job may move from this state to `other`.

        A running job becomes `queued` when its engine dies; it resumes from its last checkpoint.
        """
        match self:
            case JobState.QUEUED:
                return other in (JobState.RUNNING, JobState.PAUSED, JobState.CANCELLED, JobState.FAILED)
            case JobState.RUNNING:
                return other in (
                    JobState.PAUSED,
                    JobState.SUCCEEDED,
                    JobState.FAILED,
                    JobState.CANCELLED,
                    JobState.QUEUED,
                )
            case JobState.PAUSED:
                return other in (JobState.QUEUED, JobState.RUNNING, JobState.CANCELLED, JobState.FAILED)
            case JobState.SUCCEEDED | JobState.FAILED | JobState.CANCELLED:
                return False


class Teacher(Wire, frozen=True):
    """The teacher of a distillation job: the adapter whose outputs replace the rows' tokens in the loss."""

    ref: AdapterRef
    digests: AdapterDigests
    """Expected digests of the teacher's files."""
    rank: int


class JobSpec(Wire, frozen=True):
    """A complete job: stored by the registry, run by the engine. Its corpus is a file in the job's folder."""

    id: str
    adapter: str
    version: int
    """The version that the job publishes when it succeeds."""
    init_from: AdapterRef | None
    """Adapter to continue instead of a new one; `lora` then has its settings."""
    lora: LoraSettings
    training: TrainingSettings
    rows: int
    tokens: int
    """Tokens in one epoch of the corpus."""
    target_tokens: int
    init_digests: AdapterDigests | None = None
    """Expected digests of the files of `init_from`."""
    teacher: Teacher | None = None
    """Distillation: the loss is the divergence from this adapter's outputs."""
    rows_cut: int = 0
    """Rows truncated to the maximum length."""
    auto: tuple[str, ...] = ()
    """Fields of `training` that the daemon chose."""
    longest: int = 0
    """Tokens of the longest row; 0 for jobs stored before this field existed."""
    corpus_digest: str | None = None
    """SHA-256 (hex) of the corpus's file; None for jobs stored before this field existed."""
    soft_targets: bool = False
    """The corpus has candidates with weights for each target; the loss is the cross-entropy with them."""
    prefix: tuple[int, ...] = ()
    """Token ids, as many as `lora.r`, whose keys and values are a new cartridge's first ones."""
    evaluated: bool = False
    """The trained adapter is announced as a snapshot and evaluated by the API process before it is published."""

    @property
    def sources(self) -> tuple[AdapterRef, ...]:
        """Return the adapters whose files the job reads."""
        taught = () if self.teacher is None else (self.teacher.ref,)
        return taught if self.init_from is None else (self.init_from, *taught)
