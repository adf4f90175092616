"""Lets the preceding all-reduce add a residual connection, which saves a kernel and a read and write of the hidden
states."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

_GROUP_AT = {"linear": 4, "linear_quantized": 2}
"""The ops of linear sites, without `coserve::`, and the place of their argument `group`."""


def add_in_sums(module: GraphModule, sums: Collection[int]) -> int:
    """Give each `coserve::linear` and `coserve::linear_quantized` of a traced layer the residual that is added to its
    output, unless the output has other users.

    `sums`: groups whose linear ends in a sum over the ranks. Returns the number of replacements.
    """
    graph, found = module.graph, 0
    for node in list(graph.nodes):
        name = _linear(node)
        if name is None or node.args[_GROUP_AT[name]] not in sums:
            continue
        output, add = node, _only_user(node)
        while add is not None and _drops_nothing(add):
            output, add = add, _only_user(add)
        residual = None if add is None else _other(add, output)
        if add is None or residual is None:
            continue
        with graph.inserting_before(add):
            fused = graph.call_function(getattr(torch.ops.coserve, name), (*node.args, residual), dict(node.kwargs))
        fused.meta = dict(add.meta)
        add.replace_all_uses_with(fused)
        graph.erase_node(add)
        while output is not node:
            before = output.args[0]
            assert isinstance(before, Node), "dropout of a tensor"
            graph.erase_node(output)
            output = before
        graph.erase_node(node)
        found += 1
    if found:
        graph.lint()
        module.recompile()
    return found


def _linear(node: Node) -> str | None:
    """Return the name of the op in `_GROUP_AT` that the node calls; None if it does something else."""
    ops = {name: getattr(torch.ops.coserve, name) for name in _GROUP_AT}
    return next((name for name, op in ops.items() if node.target in (op, op.default)), None)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _drops_nothing(node: Node) -> bool:
    """Whether the node is a dropout that was traced for inference: (x, p, training, inplace)."""
    return node.target is torch.nn.functional.dropout and node.args[2:3] == (False,)


def _other(add: Node, node: Node) -> Node | None:
    """Return the tensor that `add` adds to `node`, of the same shape and dtype; None if it does something else."""
    if add.op != "call_function" or add.target not in (operator.add, torch.add) or add.kwargs or len(add.args) != 2:
        return None
    other = add.args[1] if add.args[0] is node else add.args[0]
    if not isinstance(other, Node) or other is node:
        return None
    own, value = node.meta.get("example_value"), other.meta.get("example_value")
    if not (isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)):
        return None
    return other if own.shape == value.shape and own.dtype == value.dtype else None
