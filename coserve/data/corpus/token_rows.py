"""Rows that are tokenised already, as TRL and transformers have them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coserve.core.errors import MalformedRow
from coserve.core.limits import TokenIds
from coserve.core.types import Wire

IGNORED = -100
"""Label of a token that is not learned."""
_Mask = list[Literal[0, 1]]


@dataclass(frozen=True)
class TokensRow:
    """Train on these tokens, to which none is added. `targets[i]`: token i is learned; None: all are."""

    line: int
    tokens: list[int]
    targets: list[bool] | None = None


class TokensFormat(Wire, frozen=True):
    input_ids: TokenIds
    labels: list[int] | None = None
    completion_mask: _Mask | None = None
    assistant_masks: _Mask | None = None
    attention_mask: _Mask | None = None

    def row(self, line: int) -> TokensRow:
        """Return the row; a token is learned if all of labels and masks say so. Raises `MalformedRow`."""
        masks = dict[str, list[bool]]()
        for name in ("labels", "completion_mask", "assistant_masks", "attention_mask"):
            values: list[int] | None = getattr(self, name)
            if values is None:
                continue
            if len(values) != len(self.input_ids):
                expected = (
                    f"expected {name} with an entry for each of {len(self.input_ids)} input_ids, got {len(values)}"
                )
                raise MalformedRow(expected, line=line, field=name)
            masks[name] = [value != (IGNORED if name == "labels" else 0) for value in values]
        if not all(masks.pop("attention_mask", [])):
            raise MalformedRow(
                "expected an attention_mask of ones: leave padding out", line=line, field="attention_mask"
            )
        for label, token in zip(self.labels or (), self.input_ids, strict=False):
            if label not in (IGNORED, token):
                expected = (
                    f"expected the label {token}, as in input_ids, or {IGNORED} for a token not to learn, got {label}"
                )
                raise MalformedRow(expected, line=line, field="labels")
        return TokensRow(line, self.input_ids, list(map(all, zip(*masks.values(), strict=True))) if masks else None)
