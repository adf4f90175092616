"""The state of one running request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coserve.link import Generate
from coserve.memory.prefix import PageKeys
from coserve.model.lora import LoraWeights
from coserve.types import AdapterRef, FinishReason, SamplingParams


@dataclass(eq=False)
class SequenceState:
    """Prompt and output of a request, and how much of them the KV cache holds."""

    request: Generate
    number: int
    """Of its arrival, and of no other sequence. The earlier of two wins when pages run out."""
    max_tokens: int
    """As asked for, but at most what the context leaves."""
    stop_ids: frozenset[int]
    """Tokens that end it, the base's end-of-sequence tokens included unless ignored."""
    tokens: list[int]
    """Prompt, then output as far as the host knows it."""
    in_flight: int = 0
    """Sampled tokens not yet copied to the host."""
    keys: PageKeys | None = None
    """Keys under which other sequences find its full pages; None: they cannot."""
    weights: LoraWeights | None = None
    """The adapter in pages, while the sequence is active."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose keys and values are in the pages."""
    labelled: int = 0
    """Leading pages that others can find."""
    shared: int = 0
    """Leading pages that others had computed when it became active, and may hold."""
    admitted: bool = False
    """It has had pages before now, or has them."""
    scored: int = 1
    """Leading prompt tokens whose log-probabilities are out, if asked for; the first has none."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def adapter(self) -> AdapterRef | None:
        return self.request.adapter

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def scores_prompt(self) -> bool:
        """Logits of the whole prompt are wanted, so it computes every token itself and shares no pages of others."""
        return self.sampling.prompt_logprobs is not None

    @property
    def needs_prompt_logits(self) -> bool:
        """The prompt is to be scored, and not all of it is yet (or that is all there is to do)."""
        return self.scores_prompt and (self.scored < len(self.request.prompt) or not self.max_tokens)

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled; none once its last one is in flight."""
        if self.in_flight and self.generated + self.in_flight >= self.max_tokens:
            return 0
        return self.length - self.computed

    @property
    def length(self) -> int:
        """Tokens, including those in flight."""
        return len(self.tokens) + self.in_flight

    def banned(self) -> frozenset[int]:
        """Tokens that must not be sampled next, because fewer than `min_tokens` are out or in flight."""
        return self.stop_ids if self.generated + self.in_flight < self.sampling.min_tokens else frozenset()

    def push(self, token: int) -> FinishReason | None:
        """Append the chosen token (one that ends the sequence is part of its output) and say whether that was all."""
        self.tokens.append(token)
        if token in self.stop_ids and self.generated >= self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.generated >= self.max_tokens else None
