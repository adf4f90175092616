"""Limits of request fields, as types: one declaration refuses a value, documents the limit and names the field."""

from __future__ import annotations

import struct
from typing import Annotated, Final

from msgspec import Meta

MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_LOGPROBS: Final = 20
MAX_PROMPT_LOGPROBS: Final = 1 << 18
"""Most log-probabilities of one prompt: its tokens times `prompt_logprobs + 1`."""
MAX_LOGIT_BIAS: Final = 1024
MAX_MESSAGES: Final = 1024
MAX_ROWS: Final = 1_000_000
MAX_TEXT: Final = 1 << 24
"""Characters of any text in a request."""
MAX_TOKENS: Final = 1 << 20
"""Token ids of a list in a request."""
MAX_NAMES: Final = 1024
"""Modules or patterns in a list or map of a new adapter's settings; imported ones have those of their files."""
MAX_BLOCK_NAMES: Final = 64
"""The same of `targets_bd_a` and `targets_bd_b`: each is looked for in each site's name."""
MAX_RANK: Final = 1024
"""Largest rank of a new adapter; imported ones have the rank of their tensors."""
MAX_BLOCKS: Final = 64
"""Most diagonal blocks of a new BD-LoRA adapter; imported ones have those of their files."""
PAGE_LIMIT: Final = 100
"""Most entries of one page of a list."""
PAGE_SIZE: Final = 20
"""Entries of a page unless `limit` is given."""

MAX_SEED: Final = (1 << 62) - 1
MAX_TOP_K: Final = (1 << 31) - 1

LEAST_NORMAL: Final = 2.0**-126
"""The least positive normal number of fp32. GPUs take smaller ones for 0."""

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TokenCount = Annotated[int, Meta(ge=0, le=1 << 20)]
PositiveTokenCount = Annotated[int, Meta(ge=1, le=1 << 20)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=0, le=MAX_TOP_K)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
"""`presence_penalty` and `frequency_penalty`."""
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
ModuleName = Annotated[str, Meta(max_length=512)]
"""A module's name, a part of one, or a pattern of names."""
ModuleNames = Annotated[tuple[ModuleName, ...], Meta(max_length=MAX_NAMES)]
BlockNames = Annotated[tuple[ModuleName, ...], Meta(max_length=MAX_BLOCK_NAMES)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOPS)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
"""How many of the likeliest tokens are shown with each token."""
CacheSalt = Annotated[str, Meta(max_length=256)]
AuthorName = Annotated[str, Meta(max_length=256)]
"""`name` and `tool_call_id` of a chat message."""
Seconds = Annotated[float, Meta(ge=0.001, le=3600)]
LocalPath = Annotated[str, Meta(min_length=1, max_length=4096)]
"""A path under the daemon's `data_root`."""


def below_one(value: float) -> bool:
    """Whether `value` is at least 0, and below 1 after it was rounded to fp32. False for NaN."""
    return 0 <= value < 1 and struct.unpack("f", struct.pack("f", value))[0] < 1
