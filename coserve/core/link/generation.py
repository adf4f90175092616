"""Messages about generation requests."""

from __future__ import annotations

from coserve.core.grammar import Grammar
from coserve.core.logprobs import PackedLogprobs
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterDigests, AdapterRef, FinishReason, Message, Slo

MAX_PROMPT_LOGPROBS = 256
"""Maximum prompt tokens with log-probabilities per `Tokens` message. The API process handles a message without yielding
to its event loop."""


class Generate(Message, frozen=True):
    """Generate one sequence: answered by `Tokens`, the last with `finished` set, or by one `RequestFailed`."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterRef | None
    slo: Slo
    cache_salt: str = ""
    """Only requests with the same salt share prefixes in the KV cache."""
    digests: AdapterDigests | None = None
    """Expected digests of the adapter's files, checked when they are read."""
    arrived: float | None = None
    """Arrival at the API, host-wide monotonic seconds, from which deadlines count; None: from the receipt."""
    grammar: Grammar | None = None
    """Grammar that the text follows."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens that may be sampled (None: all), and token sequences that the output must not have."""
    choices: tuple[str, ...] = ()
    """Ids of the call's other sequences; set on its last one only. If it is shed, all are, and only while all wait."""


class CancelRequest(Message, frozen=True):
    id: str


class Admitted(Message, frozen=True):
    """A request was scheduled for the first time, which ends its queue time. Sent at most once. `at`: when its step
    began, host-wide monotonic seconds. `cached`: tokens of its prompt that the prefix cache had."""

    id: str
    at: float
    cached: int = 0


class Tokens(Message, frozen=True):
    """New tokens of one request, in order. `logprobs`, if requested, has one entry per token.

    `prompt_logprobs`, if requested, come before the first token, at most `MAX_PROMPT_LOGPROBS` per message: one entry
    for each prompt token but the first.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: PackedLogprobs = PackedLogprobs()
    prompt_logprobs: PackedLogprobs = PackedLogprobs()
    finished: FinishReason | None = None
    ends_in_text: bool = False
    """Whether it stopped although its last token is part of the text: its grammar was complete."""


class RequestFailed(Message, frozen=True):
    """A request ended with an error. `retry_after`: seconds after which another attempt may succeed; None: unknown."""

    id: str
    code: str
    message: str
    retry_after: float | None = None
