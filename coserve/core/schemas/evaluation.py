"""Schemas of an adapter's measures on held-out rows: `coserve eval`, and `test` of a fine-tuning job."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from coserve.core.limits import LocalPath
from coserve.core.types import Wire

MAX_EVAL_ROWS = 1000


class EvalRequest(Wire, frozen=True, omit_defaults=True):
    """Rows that the job never learns, and how generated answers are compared with theirs: exactly unless `regex` or
    `json_field` is given. Exactly one of `data` and `path`."""

    data: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_EVAL_ROWS)] | None = None
    """Rows of texts, prompts and completions, or chats, as in `FinetuneRequest.data`."""
    path: LocalPath | None = None
    """A file or folder of at most 1000 rows under the daemon's `data_root`, in a format of `FinetuneRequest.path`;
    `FinetuneRequest.columns` names its columns, too."""
    regex: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Compare what this regular expression (RE2) finds in the texts: its first group, if it has one."""
    json_field: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Compare this field of JSON texts; `a.b` is nested."""
    max_tokens: Annotated[int, Meta(ge=1)] = 256
    """Most tokens of a generated answer."""


class EvalScore(Wire, frozen=True):
    """Means over the rows. Those of tokens are over the answers' tokens (or the texts', the first token excluded)."""

    rows: int
    tokens: int
    loss: float
    """Negative log-likelihood, nats per token."""
    token_accuracy: float
    """Fraction of tokens that have the largest logit."""
    match: float | None
    """Fraction of greedy answers that match the expected ones; None: the rows are texts."""


class EvalResult(Wire, frozen=True):
    """The measures of a job's adapter on its test rows, and those of the base."""

    adapter: EvalScore
    base: EvalScore
