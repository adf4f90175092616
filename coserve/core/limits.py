"""Limits of request fields as types: one declaration validates a value, documents the limit and names the field."""

from __future__ import annotations

import struct
from typing import Annotated, Final

from msgspec import Meta

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_BAD_WORDS: Final = 256
MAX_ALLOWED_TOKENS: Final = 1 << 15
MAX_LOGPROBS: Final = 20
MAX_PROMPT_LOGPROBS: Final = 1 << 18
"""Maximum log-probabilities of one prompt: its tokens times `prompt_logprobs + 1`."""
MAX_LOGIT_BIAS: Final = 1024
MAX_MESSAGES: Final = 1 << 12
"""Most messages of a chat, and most items of a conversation: handling each takes the event loop some microseconds.
OpenAI takes 2,048."""
MAX_PARTS: Final = 1024
"""Most parts of a message's content, and entries of other short lists."""
MAX_ROWS: Final = 1_000_000
MAX_TEXT: Final = 1 << 24
"""Maximum characters of any text in a request."""
MAX_TOKENS: Final = 1 << 20
"""Maximum token ids of a list in a request."""
MAX_TAGS: Final = 32
"""Most tags of an adapter."""
MAX_NAMES: Final = 1024
"""Maximum modules or patterns in a list or map of a new adapter's settings. Imported adapters may have more."""
MAX_BLOCK_NAMES: Final = 64
"""Maximum entries of `targets_bd_a` and `targets_bd_b`. It is lower since each is searched for in each site's name."""
MAX_RANK: Final = 1024
"""Maximum LoRA rank of a new adapter."""
MAX_IMPORTED_RANK: Final = (1 << 16) - 1
"""Maximum LoRA rank of an imported adapter, which keeps the rank of its tensors. Kernels' tables have 16 bits for
it."""
MAX_TRAINED: Final = 1 << 17
"""Maximum tokens per embedding or head whose rows an adapter trains."""
MAX_BLOCKS: Final = 64
"""Maximum diagonal blocks of a new BD-LoRA adapter."""
MAX_IMPORTED_BLOCKS: Final = 128
"""Maximum diagonal blocks of an imported BD-LoRA adapter, which keeps the number in its files."""
PINNED_SHARE: Final = 0.5
"""Share of the KV cache that the KV prefixes of pinned adapters may hold between requests."""
PAGE_LIMIT: Final = 100
"""Maximum entries per page of a list."""
PAGE_SIZE: Final = 20
"""Default entries per page."""

MAX_LIFE: Final = 10 * 366 * 86400
"""Most seconds that a key or an adapter is given to live: ten years."""
MAX_SEED: Final = (1 << 62) - 1
MAX_TOP_K: Final = (1 << 31) - 1

LEAST_NORMAL: Final = 2.0**-126
"""Smallest positive normal fp32 number. GPUs flush smaller ones to 0."""

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TokenCount = Annotated[int, Meta(ge=0, le=1 << 20)]
PositiveTokenCount = Annotated[int, Meta(ge=1, le=1 << 20)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=0, le=MAX_TOP_K)]
TopP = Annotated[float, Meta(gt=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
"""Range of `presence_penalty` and `frequency_penalty`."""
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
ModuleName = Annotated[str, Meta(max_length=512)]
"""A module's name, a substring of one, or a pattern of names."""
ModuleNames = Annotated[tuple[ModuleName, ...], Meta(max_length=MAX_NAMES)]
NamePattern = Annotated[str, Meta(max_length=4096)]
"""A regular expression of whole names."""
BlockNames = Annotated[tuple[ModuleName, ...], Meta(max_length=MAX_BLOCK_NAMES)]
TrainedTokens = Annotated[
    dict[ModuleName, Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_TRAINED)]], Meta(max_length=2)
]
"""Token ids by module (embedding or head)."""
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
BadWords = Annotated[list[StopText], Meta(max_length=MAX_BAD_WORDS)]
AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOPS)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
"""Number of most likely tokens that are returned with each token."""
CacheSalt = Annotated[str, Meta(max_length=256)]
MAX_LABEL: Final = 256
"""Most characters of a name or an id in a chat."""
AuthorName = Annotated[str, Meta(max_length=MAX_LABEL)]
"""Type of `name` and `tool_call_id` of a chat message."""
Seconds = Annotated[float, Meta(ge=0.001, le=3600)]
LocalPath = Annotated[str, Meta(min_length=1, max_length=4096)]
"""A path under the daemon's `data_root`."""


def below_one(value: float) -> bool:
    """Return whether 0 <= `value` < 1 after rounding to fp32. False for NaN."""
    return 0 <= value < 1 and struct.unpack("f", struct.pack("f", value))[0] < 1
