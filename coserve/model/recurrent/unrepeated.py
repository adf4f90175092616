"""Removes the copies of queries and keys for grouped heads that precede a recurrence."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch.fx import GraphModule, Node


def drop_repeats(module: GraphModule) -> int:
    """Let each `coserve::recur` of a traced layer read queries and keys as they were before `repeat_interleave`: the op
    groups heads in the same way itself, and the copies would take kernels of their own. Returns the number of dropped
    repeats."""
    graph, found = module.graph, 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (torch.ops.coserve.recur, torch.ops.coserve.recur.default):
            continue
        repeated = [_repeat_before(taken) for taken in node.args[:2]]
        if None in repeated:
            continue
        for taken, repeat in zip(cast("list[Node]", node.args[:2]), cast("list[Node]", repeated), strict=True):
            taken.replace_input_with(repeat, cast(Node, repeat.args[0]))
            if not repeat.users:
                graph.erase_node(repeat)
            found += 1
    if found:
        graph.lint()
        module.recompile()
    return found


def _repeat_before(taken: object) -> Node | None:
    """Return the node `x.repeat_interleave(n, dim=2)`, (1, T, H, K), whose element 0 is `taken`; None if there is
    none."""
    if not isinstance(taken, Node) or taken.target is not operator.getitem or taken.args[1] != 0:
        return None
    repeat = taken.args[0]
    if not isinstance(repeat, Node) or repeat.target != "repeat_interleave" or repeat.kwargs != {"dim": 2}:
        return None
    return repeat
