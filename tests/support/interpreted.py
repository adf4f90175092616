"""Compiled training layers without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx


def interpreted(
    graph: fx.GraphModule, inputs: Sequence[object], *, is_backward: bool
) -> Callable[[list[object]], Sequence[Tensor]]:
    """Run the graph operation by operation; a `Compile` without a compiler."""

    def run(given: list[object]) -> Sequence[Tensor]:
        inputs = tuple(given)
        given.clear()
        outputs: Sequence[Tensor] = graph(*inputs)
        return outputs

    return run
