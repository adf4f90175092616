"""A garbage collector that only counts."""

from __future__ import annotations


class Interpreter:
    """Counts as the interpreter's collector does."""

    def __init__(self) -> None:
        self.counts = [0, 0, 0]
        self.collected: list[int] = []

    def count(self) -> tuple[int, int, int]:
        return self.counts[0], self.counts[1], self.counts[2]

    def collect(self, generation: int) -> int:
        self.collected.append(generation)
        if generation < 2:
            self.counts[generation + 1] += 1
        self.counts[: generation + 1] = [0] * (generation + 1)
        return 0
