"""Schemas of documents that become adapters: the settings, the progress and the evaluation of their jobs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from coserve.core.limits import MAX_PARTS, LocalPath, Text
from coserve.core.names import VERSIONED_NAME
from coserve.core.types import Wire

Recipe = Literal["topk_kd", "ce", "lm", "cartridge", "encoder"]
Phase = Literal["chunks", "questions", "answers", "training", "evaluation", "done"]
Generator = Annotated[str, Meta(pattern=rf"\A(base|none|adapter:{VERSIONED_NAME})\Z")]


class UserQuestion(Wire, frozen=True):
    """A question of the user's own. An answer is learned as it is. Without one, the generator answers with a part of
    the document in its prompt: the one that shares the most words with the question."""

    question: Annotated[Text, Meta(min_length=1)]
    answer: Annotated[Text, Meta(min_length=1)] | None = None


class DocumentSettings(Wire, frozen=True, omit_defaults=True):
    """How a document becomes an adapter (offline context learning: the S-LoRA thesis, section 3; self-study and context
    distillation: Cartridges, arXiv 2506.06266).

    The document is split into chunks. The generator writes questions about each chunk's sentences and answers them
    with the chunk and the sentence in its prompt. The adapter learns the answers without them.
    """

    recipe: Recipe = "topk_kd"
    """`topk_kd`: learn the generator's distribution over its 20 most likely tokens at each token of an answer. `ce`:
    learn the answers' tokens. `lm`: learn the document's own text, token by token; questions are for the evaluation
    only. `cartridge`: learn as `topk_kd` does, not with LoRA but with a KV prefix of `prefix_tokens` tokens, which
    begins as the document's own first tokens. `encoder`: train a LoRA to read each chunk into memory tokens, from which
    the base gives the chunks' text in the first third of the steps (reconstruction), then the answers; what is
    published is a cartridge of them all."""
    prefix_tokens: Annotated[int, Meta(ge=2, le=1 << 14)] | None = None
    """Tokens of a `cartridge`, fewer if the document has fewer; memory tokens of each chunk with `encoder`. The whole
    prefix takes room in the context of every request. None: 512, or what the context leaves; 128 with `encoder`."""
    decoder_lora: bool = False
    """`encoder`: also train a LoRA of the decoder, which reads the memory, with the encoder's `lora` settings. It is
    published beside the cartridge in one adapter. False: the base is the decoder."""
    generator: Generator = "base"
    """`base`, or `adapter:NAME` or `adapter:NAME@VERSION`: the model that asks and answers. `none`, for bases that
    follow no instructions: the base continues each piece of the text with the text before it in its prompt, and the
    adapter learns to do so without it."""
    questions: Annotated[list[UserQuestion], Meta(max_length=MAX_PARTS)] = []
    """The user's own questions, instead of generated ones: four different ones at least, or two with the recipe `lm`
    or `publish: always`."""
    chunk_tokens: Annotated[int, Meta(ge=16, le=1 << 16)] | None = None
    """Most tokens of a chunk. None: 1024, or half of the base's context if that is less."""
    overlap_tokens: Annotated[int, Meta(ge=0, le=1 << 15)] | None = None
    """Tokens that a chunk shares with the one before it. None: an eighth of `chunk_tokens`."""
    questions_per_chunk: Annotated[int, Meta(ge=1, le=4096)] = 32
    """How many different questions each chunk gets, if the generator finds so many."""
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.7
    """Temperature of questions. Answers are greedy."""
    answer_tokens: Annotated[int, Meta(ge=1, le=4096)] = 128
    """Most tokens of an answer."""
    instruction: Text = "Answer in one short sentence."
    """Instruction that the generator gets with a chunk and a question; the adapter learns to answer that way. May be
    empty."""
    replay: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Answers of the bare base to general prompts that the adapter learns, too, so that it forgets less: their number
    as a fraction of the questions'. Except with `ce`, they also teach the total probability of all tokens beyond the
    base's 20 most likely ones."""
    lm_weight: Annotated[float, Meta(ge=0, le=10)] | None = None
    """Weight of the document's own text in the loss, in addition to the answers. None: 0 with `ce`, otherwise 1.
    `encoder` with 0: no reconstruction."""
    holdout: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Fraction of the questions, at least 4 and at most 64 of them, that is not learned but evaluated."""
    publish: Literal["if_learned", "always"] = "if_learned"
    """`if_learned`: a job whose adapter answers the held-out questions no better than the base does without the
    document, or than the adapter of another document does, fails with `not_learned`. `always`: it is published, with a
    note."""

    @property
    def generator_adapter(self) -> str | None:
        """Return the adapter that asks and answers, as `name` or, of an accepted job, `name@version`."""
        return self.generator.partition(":")[2] or None


class DocumentRequest(DocumentSettings, frozen=True, omit_defaults=True):
    """A document with the settings of its job. Exactly one of `text`, `path` and the request's part `file`."""

    text: Annotated[Text, Meta(min_length=1)] | None = None
    path: LocalPath | None = None
    """A file of text, Markdown or PDF, or a folder of them, under the daemon's `data_root`. PDF needs
    `coserve[pdf]`."""


class AnswerScore(Wire, frozen=True):
    """How well the held-out questions are answered: means over them."""

    nll: float
    """Negative log-likelihood of the expected answers, nats per token."""
    exact_match: float | None
    """Fraction of greedy answers that are the expected ones; None without a generator."""


class DocumentEvaluation(Wire, frozen=True):
    """The held-out questions answered in several ways, and what the adapter has forgotten."""

    questions: int
    floor: AnswerScore
    """The base, without the document."""
    in_context: AnswerScore
    """The base, with the chunk of the question in its prompt, and the sentence that a generated one is about."""
    adapter: AnswerScore
    """The adapter, without the document."""
    retention: float
    """Relative change of the adapter's negative log-likelihood, from the base's, of texts that the base wrote about
    general prompts: 0.02 is a loss of 2%."""
    other: AnswerScore | None = None
    """The latest adapter of another document; None: there is none."""
    other_adapter: str | None = None
    recovered: float | None = None
    """Fraction of the document's gain in log-likelihood that the adapter reaches without it: (floor - adapter) / (floor
    - in_context); None if the context gains nothing."""
    learned: bool = True
    """Whether the adapter is better than `floor` and `other`, each with 95% confidence (one-sided t-tests of the mean
    difference of the held-out questions, nats per token). Without `other` a part of the gain may be the answers'
    form."""

    @property
    def losses(self) -> list[str]:
        """Each way's name and negative log-likelihood, such as `floor 2.310`."""
        arms = [("floor", self.floor), ("in context", self.in_context), ("adapter", self.adapter)]
        arms += [] if self.other is None else [("another document's", self.other)]
        return [f"{name} {score.nll:.3f}" for name, score in arms]


class DocumentJob(Wire, frozen=True):
    """Progress of a document's job."""

    settings: DocumentSettings
    phase: Phase = "chunks"
    """The current phase. `chunks`: the document is split, which it is before its job is accepted, and nothing is asked
    yet. The user's own questions, and generator `none`, have no phase `questions`."""
    chunks: int = 0
    tokens: int = 0
    """Tokens of the document."""
    digest: str = ""
    """SHA-256 of the document's text; it distinguishes adapters of this document from those of others."""
    done: int = 0
    """Items of this phase that are done, of `total`, which stays the same throughout: chunks; different questions that
    have the chunk's words (if too few are found, others make up for them); answers; optimizer steps; evaluated
    items."""
    total: int = 0
    questions: int = 0
    """Different questions, those held out included."""
    generated_tokens: int = 0
    """Tokens generated for questions and answers."""
    evaluation: DocumentEvaluation | None = None
