"""The sampler's results: tokens on the device, and choices on the host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from msgspec import Struct
from torch import Tensor

from coserve.core.logprobs import TokenLogprob
from coserve.generate.sampling.logprobs import Logprobs
from coserve.generate.sampling.transfer import fetch
from coserve.kernels.sampling.constants import NONE_LEFT, NOT_FINITE


class Choice(Struct, frozen=True):
    token: int
    logprob: TokenLogprob | None
    """The token's log-probability and top tokens, if requested."""


class NoToken(IntEnum):
    """Why no token could be chosen."""

    NOT_FINITE = NOT_FINITE
    """The model's logits are NaN or infinite."""
    NONE_LEFT = NONE_LEFT
    """Bias, penalties, banned tokens and mask of the request exclude every token."""


@dataclass(frozen=True)
class Chosen:
    tokens: Tensor
    """int64 (B); a `NoToken` where the logits are not finite or the request leaves no token to choose."""
    logprobs: Logprobs | None
    """Log-probabilities of the rows that request them; None if none does."""
    likeliest: bool = False
    """Whether each token is the argmax of its raw logits."""

    def fetch(self) -> Chosen:
        """Return a host copy, filled asynchronously."""
        return Chosen(fetch(self.tokens), None if self.logprobs is None else self.logprobs.fetch(), self.likeliest)


def choices(chosen: Chosen) -> list[Choice | NoToken]:
    """Convert to host values. Waits for the device, unless the tensors are on the host."""
    entries = {} if chosen.logprobs is None else chosen.logprobs.entries()
    tokens = chosen.tokens.tolist()
    return [NoToken(token) if token < 0 else Choice(token, entries.get(i)) for i, token in enumerate(tokens)]
