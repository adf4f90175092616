"""Settings of a training: as users request them, and as a job has them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from coserve.core.limits import MAX_PARTS, Text
from coserve.core.messages import ChatMessage
from coserve.core.types import Wire


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


class Schedule(StrEnum):
    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


Auto = Literal["auto"]
"""The daemon chooses the value from the size of the corpus and of the base (`data/corpus/defaults.py`)."""
TrainOn = Literal["completion", "all", "assistant"]
"""The tokens of a row that enter the loss."""


class DpoLoss(Wire, frozen=True, tag_field="type", tag="dpo"):
    """Direct preference optimization (Rafailov et al. 2023, equation 7), and its relatives in TRL."""

    beta: float = 0.1
    """Scale of the rewards: how strongly the adapter is held to the reference."""
    reference: Literal["start", "base"] = "start"
    """Reference policy of the loss: the adapter at the job's start (the base, if the adapter is new), or the base."""
    loss_type: Literal[
        "sigmoid",
        "hinge",
        "ipo",
        "robust",
        "exo_pair",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "sigmoid_norm",
        "aot",
        "aot_unpaired",
        "discopop",
    ] = "sigmoid"
    """As in TRL's `DPOConfig`. `aot` and `aot_unpaired` sort the margins, or the rewards, of each micro-batch."""
    label_smoothing: float = 0.0
    """Share of pairs that are taken to be the wrong way round. Of `sigmoid` (conservative DPO), `robust`,
    `exo_pair`, `aot` and `aot_unpaired`."""
    discopop_tau: float = 0.05
    """Temperature of `discopop`: how fast it goes from its exponential to its logistic part."""
    sft_weight: float = 0.0
    """Weight of the chosen answer's mean negative log-likelihood, which is added: LLaMA-Factory's `pref_ftx`. TRL's
    loss type `sft`, its former `rpo_alpha`, averages over the tokens of all chosen answers of a batch instead."""


class OrpoLoss(Wire, frozen=True, tag_field="type", tag="orpo"):
    """Odds ratio preference optimization (Hong et al. 2024, equation 6), without a reference: the chosen answer's mean
    negative log-likelihood, and `beta` times the odds ratio's."""

    beta: float = 0.1
    """Weight of the odds ratio: the paper's lambda."""


class SimpoLoss(Wire, frozen=True, tag_field="type", tag="simpo"):
    """Simple preference optimization (Meng et al. 2024, equation 6), without a reference: rewards are mean
    log-probabilities of the answers' tokens."""

    beta: float = 2.0
    """Scale of the rewards."""
    gamma: float = 1.0
    """The margin of rewards that is aimed at: TRL's and LLaMA-Factory's `simpo_gamma`."""
    sft_weight: float = 0.0
    """As in `DpoLoss`; TRL's `cpo_alpha`."""


class KtoLoss(Wire, frozen=True, tag_field="type", tag="kto"):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equation 7) of answers that are each desirable or not, and
    its relative in TRL."""

    beta: float = 0.1
    """As in `DpoLoss`."""
    reference: Literal["start", "base"] = "start"
    """As in `DpoLoss`."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """As in TRL's `KTOConfig`. `kto` compares rewards with an estimate of the KL divergence from the reference, for
    which each row is computed a second time, with another row's answer."""
    desirable_weight: float = 1.0
    """Weight of the rows whose label is true."""
    undesirable_weight: float = 1.0
    """Weight of the rows whose label is false."""


PairLoss = DpoLoss | OrpoLoss | SimpoLoss
"""A loss of pairs: of a chosen and a rejected answer."""
PreferenceLoss = PairLoss | KtoLoss
"""A loss of pairs, or of answers with a label."""


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
    batch_rows: int | None = None
    """Rows per optimizer step, on average, instead of `batch_tokens`, which it becomes by the mean length of a row."""
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
    loss: PreferenceLoss | None = None
    """None: the negative log-likelihood of the target tokens. Others need rows of `prompt`, `chosen` and `rejected`;
    `kto` of `prompt`, `completion` and `label`."""
    schedule: Schedule = Schedule.LINEAR
    warmup_steps: int = 0
    warmup_ratio: float | None = None
    """Share of the steps that are warm-up, instead of `warmup_steps`, which it becomes."""
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
        tuple[Text | Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_PARTS)], ...], Meta(max_length=MAX_PARTS)
    ] = ()
    """Texts, or chats as lists of messages. The adapter in training generates one sample for each, every `sample_steps`
    steps and at the end. Sampling does not affect the training."""
    sample_steps: int = 20
    """Optimizer steps between two samples."""
    sample_max_tokens: int = 128
    """Maximum tokens of a sample."""
    sample_temperature: float = 0.0
    """0: greedy. Above 0, samples are drawn with the job's `seed`."""

    @property
    def mismatches(self) -> bool:
        """Whether each row is also computed with another row's answer."""
        return isinstance(self.loss, KtoLoss) and self.loss.loss_type == "kto"


class TrainingSettings(TrainingRequest, frozen=True):
    """Training settings of a job: a `TrainingRequest` with every value resolved. Also accepted as a request."""

    epochs: float | None = None
    batch_tokens: int = 2048
    learning_rate: float = 2e-4
    beta2: float = 0.999

    @property
    def held_back(self) -> bool:
        """Return whether rows are held back to measure the loss on."""
        return bool(self.validation_split or self.validation_rows)
