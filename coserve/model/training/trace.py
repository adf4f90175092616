"""Compiles a decoder layer's forward and backward as two functions, for any number of tokens.

The layer's own code is traced with attention and linear sites as opaque ops (`training.ops`) into one joint graph.
torch's min-cut partitioner cuts it into a forward and a backward, and inductor compiles both. There is one cut for each
value of `Kept`. For `Kept.ALL` the partitioner decides what the backward recomputes (cheap operations, such as norms
and activations); the others prescribe what is saved.

Unlike torch.compile's autograd functions, the two are called directly for any layer of the kind: neither autograd nor
guards are involved. The conditions of guards are covered by the layer's kind (`training.kinds`) and by a condition on
the number of tokens (`fits`).

Functions import inductor, which takes more than a second: an engine without a GPU never needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import CheckpointPolicy

from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import Kept
from coserve.model.training.ops import ATTEND, LEARN
from coserve.model.training.recurrent_ops import RECUR
from coserve.model.training.running_pass import Again

SAVE_LESS: dict[str, object] = {"ban_recompute_materialized_backward": False}
"""Partitioner options that recompute the inputs of GEMMs (outputs of norms and activations), which saves a third of the
memory."""


PARTITION: dict[Kept, dict[str, object]] = {
    Kept.ALL: SAVE_LESS,
    Kept.ATTENTION: SAVE_LESS,  # and `_mark_all_but_attention` marks operations
    Kept.INPUT: {"activation_memory_budget": 0.0},
}
"""Partitioner options for each cut."""


class Compile(Protocol):
    """Compiles a graph with example inputs. The result takes a list of inputs and empties it."""

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[object], *, is_backward: bool
    ) -> Callable[[list[object]], Sequence[Tensor]]: ...


def inductor(
    graph: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool
) -> Callable[[list[object]], Sequence[Tensor]]:
    """Compile with inductor; the `Compile` for production."""
    from torch._inductor.compile_fx import compile_fx_inner

    compiled = compile_fx_inner(graph, inputs, is_backward=is_backward)
    return cast("Callable[[list[object]], Sequence[Tensor]]", compiled)


@dataclass
class CompiledLayer:
    """One layer's compiled forward and backward."""

    _forward: Callable[[list[object]], Sequence[Tensor]]
    _backward: Callable[[list[object]], Sequence[Tensor]]
    _saved: tuple[int, ...]
    """For each input of the backward but the last (the gradient): its index among the forward's outputs."""
    _conditions: Callable[[int], bool]
    again: Again
    unread_sums: frozenset[int]
    """Indices of the sums over ranks that only the hidden states' gradient depends on."""
    _known: dict[int, bool] = field(default_factory=dict)

    def fits(self, tokens: int) -> bool:
        """Whether it accepts this number of tokens."""
        if tokens not in self._known:
            self._known[tokens] = self._conditions(tokens)
        return self._known[tokens]

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, list[object]]:
        """Return the layer's output, and the tensors that its backward needs."""
        output, *rest = self._forward(list(inputs))
        return output, [rest[place - 1] for place in self._saved]

    def backward(self, saved: list[object], gradient: Tensor) -> Tensor:
        """Return the gradient of the hidden states; empties `saved`."""
        saved.append(gradient)
        return self._backward(saved)[0]


@dataclass(frozen=True)
class TracedLayer:
    """One layer's forward and backward as graphs."""

    _forward: fx.GraphModule
    _backward: fx.GraphModule
    """Backward graph of the cut for `Kept.ALL`."""
    _joint: fx.GraphModule
    _mode: FakeTensorMode
    _shapes: ShapeEnv
    _hidden: FakeTensor

    def compile(self, compile: Compile = inductor, kept: Kept = Kept.ALL) -> CompiledLayer:
        """Compile a cut, on any thread. Raises `UnsupportedBase`.

        Other threads may run torch.compile's functions meanwhile, as long as the compiler finds its results on disk.
        """
        with tracing(TracingContext(self._mode)):
            cut = (self._forward, self._backward) if kept is Kept.ALL else _cut(self._joint, kept)
            # before a compiler replaces nodes: inductor's softmax on GPUs is one, whose maximum has another name
            places, again, unread = _places(*cut), _again(cut[1]), _unread_sums(cut[1])
            forward, backward = (
                compile(graph, _examples(graph), is_backward=is_backward)
                for graph, is_backward in zip(cut, (False, True), strict=True)
            )
        return CompiledLayer(forward, backward, places, _conditions(self._shapes, self._hidden), again, unread)


def trace_layer(run: Callable[..., Tensor], tensors: Sequence[Tensor], tokens: int) -> TracedLayer:
    """Trace `run(hidden, *others) -> hidden`, without gradients of the others.

    `tensors`: examples of its inputs; a size of `tokens` stands for any number. Meanwhile torch.compile's functions
    fail on every thread, as fx marks the whole process as tracing. Raises `UnsupportedBase` if the layer cannot be
    traced so.
    """
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    fakes = [_fake(mode, tensor, tokens, place) for place, tensor in enumerate(tensors)]
    fakes[0].requires_grad_()
    try:
        with tracing(TracingContext(mode)):
            joint = _joint(run, fakes)
            joint_graph_passes(joint)
            forward, backward = _cut(joint, Kept.ALL)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UnsupportedBase(f"its layers cannot be traced for training: {error}") from error
    _refuse_constants(forward, backward)
    return TracedLayer(forward, backward, joint, mode, shapes, fakes[0])


def _cut(joint: fx.GraphModule, kept: Kept) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut `joint` into a forward and a backward that save no more than `kept` says. `joint` is not changed."""
    import torch._functorch.config as partition_options
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    own = fx.GraphModule(joint, _copied(joint.graph))
    if kept is Kept.ATTENTION:
        _mark_all_but_attention(own.graph)
    with partition_options.patch(PARTITION[kept]):
        forward, backward = min_cut_rematerialization_partition(own, (), num_fwd_outputs=1)
    return forward, backward


def _copied(graph: fx.Graph) -> fx.Graph:
    """Copy the graph's nodes, since the partitioner changes its graph."""
    own = fx.Graph()
    found = own.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(found, tuple), "expected a graph with an output"
    values, output = found
    own.output(values).meta = dict(output.meta)
    return own


def _mark_all_but_attention(joint: fx.Graph) -> None:
    """Tell the partitioner to save the outputs of attention and recurrences, and nothing else that the forward
    computes."""
    after_gradient = set[fx.Node]()
    for node in joint.nodes:
        if (node.op == "placeholder" and "tangents" in node.target) or after_gradient & {*node.all_input_nodes}:
            after_gradient.add(node)
        elif node.op == "call_function":
            own = node.target in (ATTEND, RECUR)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if own else CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0  # expected by some releases of torch together with `recompute`


def _again(backward: fx.GraphModule) -> Again:
    """Return the opaque operations of the forward that a backward recomputes."""
    nodes = backward.graph.nodes
    groups = frozenset(cast(int, node.args[2]) for node in nodes if node.target is LEARN)
    return Again(groups, *(any(node.target is op for node in nodes) for op in (ATTEND, RECUR)))


def _joint(run: Callable[..., Tensor], fakes: Sequence[FakeTensor]) -> fx.GraphModule:
    """Trace forward and backward as one graph: (inputs, output's gradient) -> (output, inputs' gradients)."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table

    joint = aot_export_joint_simple(
        lambda *inputs: (run(*inputs),), tuple(fakes), trace_joint=True, decompositions=select_decomp_table()
    )
    return cast(fx.GraphModule, joint)


def _fake(mode: FakeTensorMode, tensor: Tensor, tokens: int, place: int) -> FakeTensor:
    sizes = [DimDynamic.DUCK if size == tokens else DimDynamic.STATIC for size in tensor.shape]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor.detach(), symbolic_context=context, source=ConstantSource(f"input_{place}"))


def _examples(graph: fx.GraphModule) -> list[object]:
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def _places(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[int, ...]:
    """Return `CompiledLayer._saved`. The partitioner gives a saved value the same name in both graphs."""
    (outputs,) = next(node for node in forward.graph.nodes if node.op == "output").args
    places = {node.name: place for place, node in enumerate(outputs) if place}
    inputs = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
    return tuple(places[name] for name in inputs[:-1])


def _refuse_constants(*graphs: fx.GraphModule) -> None:
    """Raise `UnsupportedBase` if a graph, which must serve all layers of its kind, contains a tensor of one layer."""
    for graph in graphs:
        for node in graph.graph.nodes:
            if node.op == "get_attr" and getattr(getattr(graph, node.target, None), "ndim", 1) > 0:
                raise UnsupportedBase(f"its layers read a tensor that is no parameter ({node.target})")


def _conditions(shapes: ShapeEnv, hidden: FakeTensor) -> Callable[[int], bool]:
    """Return the condition on the number of tokens under which the traced and compiled layer is valid.

    Raises `UnsupportedBase` if it is valid for one number only.
    """
    size = hidden.shape[1]
    if isinstance(size, int) or not size.node.expr.is_symbol:
        raise UnsupportedBase(f"its layers are for {size} tokens only")
    symbol = size.node.expr
    assumed, limits = [guard.expr for guard in shapes.guards], shapes.var_to_range[symbol]

    def hold(tokens: int) -> bool:
        within = bool(limits.lower <= tokens <= limits.upper)
        return within and all(bool(one.subs({symbol: tokens})) for one in assumed)

    return hold


def _unread_sums(backward: fx.GraphModule) -> frozenset[int]:
    """Return `CompiledLayer.unread_sums`."""
    ops, learns, unread = torch.ops.coserve, set[fx.Node](), set[int]()
    for node in reversed(backward.graph.nodes):
        if node.target is ops.learn_backward.default or not learns.isdisjoint(node.users):
            learns.add(node)
        elif node.target is ops.sum_ranks.default:
            unread.add(cast(int, node.args[1]))
    return frozenset(unread)
