"""Expectations of how long answers become."""

from __future__ import annotations

from coserve.generate.output_lengths import OutputLengths


class OneMoreToken(OutputLengths):
    """Each answer is expected to end with its next token: sequences are admitted as long as there are pages, and then
    give way."""

    def expected(self, number: int, generated: int, max_tokens: int, *, stops: bool) -> int:
        return min(max_tokens, generated + 1)
