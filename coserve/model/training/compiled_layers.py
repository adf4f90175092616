"""A base's decoder layers compiled for training: forward and backward without autograd, for all layers of a kind
alike."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import Kept, TrainingCosts
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import PreparedLora
from coserve.model import probe
from coserve.model.agreement import on_all_ranks
from coserve.model.base import Base
from coserve.model.faults import out_of_memory
from coserve.model.forward_context import ForwardContext, current, running
from coserve.model.groups import share_inputs
from coserve.model.layers import LayerCall, LayerCut, LayerInputs
from coserve.model.lora import SharedInput, shared_of
from coserve.model.parallel.mesh import LoneRank, Mesh
from coserve.model.training.kinds import kind_of, own_tensors, plain
from coserve.model.training.ops import AttendRows, TracedRanks
from coserve.model.training.running_pass import AlonePass, RunningPass
from coserve.model.training.trace import Compile, CompiledLayer, TracedLayer, inductor, trace_layer

log = logging.getLogger(__name__)

EXAMPLE_TOKENS = 2039
"""Of the traced batch: a prime, so that no other size is equal to it; as large as batches are, for the kernels' block
sizes."""
EXAMPLE_ROW = 61
"""Tokens of a sequence in it."""
CHECKED_TOKENS = 251
"""Of the batch that cuts which keep less are checked with, beside jobs, which leave little memory: a prime, as the
example's."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Most relative error of a compiled layer."""
COMPARED_TOKENS = tuple(sorted({(1 << power) + more for power in range(18) for more in (-1, 0, 1)}))
"""Sizes of batches of which all ranks must say alike whether compiled layers are for them. (What was loaded from disk
says the same in other words.)"""
MAX_KINDS = 4
"""Kinds of layers that are compiled; a base with more has layers that differ in what they compute with."""


class CompiledLayers:
    """Traced at once; call `compile`, on any thread: until then the layers are not `ready`. `compile_levels` adds the
    cuts that keep less."""

    def __init__(
        self,
        base: Base,
        cut: LayerCut,
        compile: Compile = inductor,
        stream: Callable[[], AbstractContextManager[object]] = nullcontext,
        costs: Callable[[], TrainingCosts | None] = lambda: None,
    ) -> None:
        """On the thread that runs the base: see `trace_layer`. `stream` enters the stream that training runs on.
        `costs` of memory, as far as they were
        measured: asked for once the layers are compiled. Ranks that share a base do this at the same time. Raises
        `UnsupportedBase`, of ranks `FailedTogether`, and whatever the stacking of weights raises, which cannot be
        undone."""
        if not base.sites.shared():
            share_inputs(base)
        self._compile, self._stream, self._device = compile, stream, base.device
        self._mesh = None if base.sharding is None else base.sharding.mesh
        self.cut = cut
        self._load_costs = costs
        self.costs: TrainingCosts | None = None
        """Of memory, by which jobs may be planned; None: they are not known, or a batch was refused: others may be,
        too."""
        self.notes: tuple[str, ...] = ()
        """On the last batch that they were not right for, for an operator."""
        self._compiled: dict[Kept, dict[Hashable, CompiledLayer]] = {}
        self._traced = on_all_ranks(self._mesh, base.device, lambda: self._trace(base), self._order_of_kinds)
        self._wait_for_examples = _mark(base.device)

    def _trace(self, base: Base) -> dict[Hashable, TracedLayer]:
        """A layer of each kind. Raises `UnsupportedBase`."""
        inputs, few = (_example_inputs(base, self.cut, tokens) for tokens in (EXAMPLE_TOKENS, CHECKED_TOKENS))
        paths = {id(module): name for name, module in base.model.named_modules()}
        shared = base.sites.shared_by_site()
        if missing := base.spec.sites.keys() - shared.keys():
            raise UnsupportedBase(f"{min(missing)} runs for some tokens only")
        self._groups: list[list[SharedInput]] = []
        self._own: list[list[Tensor]] = []
        self._kinds: list[Hashable] = []
        self._constants: list[tuple[list[object], pytree.TreeSpec]] = []
        self._examples: dict[Hashable, _Example] = {}
        self._few: dict[Hashable, _Example] = {}  # of fewer tokens
        for layer, call, few_call in zip(base.layers, inputs.calls, few.calls, strict=True):
            prefix = f"{paths[id(layer)]}."
            groups = {name.removeprefix(prefix): one for name, one in shared.items() if name.startswith(prefix)}
            own = own_tensors(layer, groups)
            arguments = _Arguments.of(call)
            kind = (kind_of(layer, groups), arguments.kind, tuple(own))
            self._groups.append(sorted({id(one): one for one in groups.values()}.values(), key=lambda one: one.index))
            self._own.append(list(own.values()))
            self._kinds.append(kind)
            self._constants.append(arguments.constants)
            if kind not in self._examples:
                traced, plain = _copies(layer, self._mesh)
                self._examples[kind] = _Example(traced, plain, call, inputs.h_1TD, own)
                self._few[kind] = replace(self._examples[kind], call=few_call, h_1TD=few.h_1TD)
        if len(self._examples) > MAX_KINDS:
            raise UnsupportedBase(f"its layers are of {len(self._examples)} kinds, expected {MAX_KINDS} at most")
        return {kind: trace_layer(one.run, one.tensors, EXAMPLE_TOKENS) for kind, one in self._examples.items()}

    def _order_of_kinds(self, traced: Mapping[Hashable, TracedLayer]) -> str:
        order = [*traced]
        return repr([order.index(kind) for kind in self._kinds])

    def compile(self) -> None:
        """While other threads may capture CUDA graphs, which waiting for the whole device would break. Ranks that share
        a base do this at the same time. Raises `UnsupportedBase`, and what the compiler raises; of ranks
        `FailedTogether`. It may be called again where it found no memory."""
        try:
            compiled = self._compile_cut(Kept.ALL)
        except BaseException as error:
            if not out_of_memory(error):
                self.forget_examples()
            raise
        if self._mesh is not None:
            self.forget_examples()
        self.costs = self._load_costs()
        self._compiled = {Kept.ALL: compiled}

    def compile_levels(self, costs: TrainingCosts | None = None) -> None:
        """After `compile`, as it: the cuts that keep less. `costs`: of memory, with those of the cuts; None: they are
        measured next. Raises `UnsupportedBase`."""
        if self._mesh is not None:
            raise UnsupportedBase("ranks share the base")
        try:
            lean = {kept: self._compile_cut(kept) for kept in (Kept.ATTENTION, Kept.INPUT)}
        except BaseException as error:
            if not out_of_memory(error):
                self.forget_examples()
            raise
        self.forget_examples()
        self._compiled = self._compiled | lean
        if costs is not None and not self.notes:
            self.costs = costs

    def forget_examples(self) -> None:
        """Free what `compile` and `compile_levels` need."""
        self._examples, self._few, self._traced = {}, {}, {}

    def _compile_cut(self, kept: Kept) -> dict[Hashable, CompiledLayer]:
        found = dict[Hashable, CompiledLayer]()

        def compile_all() -> list[str]:
            """What must be alike on all ranks: the collectives in the order of the compiled code, its batches, and
            which sums may be left out."""
            if self._device.type == "cuda":
                _wake_autograd(self._device)
            alike: list[str] = []
            with self._stream():
                self._wait_for_examples()
                for kind, example in self._examples.items():
                    one = found[kind] = self._traced[kind].compile(self._compile, kept)
                    few = kept is not Kept.ALL and one.fits(CHECKED_TOKENS)
                    alike += self._check(self._kinds.index(kind), self._few[kind] if few else example, one)
                    alike.append(repr(([size for size in COMPARED_TOKENS if one.fits(size)], sorted(one.unread_sums))))
            return alike

        on_all_ranks(self._mesh, self._device, compile_all, repr)
        return found

    def _check(self, i: int, example: _Example, compiled: CompiledLayer) -> list[str]:
        """The layer's collectives in order, on this rank alone: they return its own term. Raises `UnsupportedBase`
        where a compiled layer computes something else than the layer does."""
        h_1TD, attention = example.h_1TD, example.attention
        tensors = {i: [*_Arguments.of(example.call).tensors, *example.own.values()]}
        running_pass = AlonePass(attention, None, self._groups)
        one = CompiledPass({Kept.ALL: {i: compiled}}, tensors, running_pass)
        output_1TD, saved = one.forward(i, h_1TD, Kept.ALL)
        gradient_1TD = torch.ones_like(h_1TD)
        found = output_1TD, one.backward(i, saved, gradient_1TD, Kept.ALL)
        expected = example.expected(gradient_1TD)
        for what, own, right in zip(("output", "gradient"), found, expected, strict=True):
            error = float(torch.linalg.vector_norm((own - right).float()) / torch.linalg.vector_norm(right.float()))
            if not error <= TOLERANCE[h_1TD.dtype]:
                raise UnsupportedBase(f"the compiled layer {i} gives another {what}: relative error {error:.2g}")
        return running_pass.collectives

    @property
    def may_keep_less(self) -> bool:
        """Whether there is `compile_levels` for this base."""
        return self._mesh is None

    @property
    def ready(self) -> bool:
        """They are compiled."""
        return bool(self._compiled)

    @property
    def cuts(self) -> frozenset[Kept]:
        """Those that are compiled."""
        return frozenset(self._compiled)

    def sites_kept(self, kept: Kept) -> frozenset[str]:
        """Sites whose x Aᵀ layers of this cut keep for their backward; that of the others is computed again."""
        compiled = self._compiled[kept]
        return frozenset(
            name
            for kind, groups in zip(self._kinds, self._groups, strict=True)
            for shared in groups
            if shared.index not in compiled[kind].again.groups
            for name in shared.group.names
        )

    def begin(self, inputs: LayerInputs, lora: PreparedLora | None) -> CompiledPass | None:
        """A pass over the layers; None where they are not compiled, or were traced for other batches. `lora`: its pairs
        have `MainGrads`, unless there is no backward."""
        if not self.ready or not isinstance(inputs.attention, PackedAttention):
            return None
        tokens, given = inputs.h_1TD.shape[1], [_Arguments.of(call) for call in inputs.calls]
        cuts = self._compiled
        if not all(one.fits(tokens) for kinds in cuts.values() for one in kinds.values()):
            self._note(
                f"batches of {tokens} tokens run operation by operation: the compiled layers are for other sizes"
            )
            return None
        if any(own.constants != traced for own, traced in zip(given, self._constants, strict=True)):
            self._note(
                "layers run operation by operation: the model gives them other arguments than when they were compiled"
            )
            return None
        tensors = {i: [*own.tensors, *self._own[i]] for i, own in enumerate(given)}
        layers = {kept: {i: kinds[kind] for i, kind in enumerate(self._kinds)} for kept, kinds in cuts.items()}
        return CompiledPass(layers, tensors, RunningPass(inputs.attention, lora, self._groups, self._mesh))

    def _note(self, note: str) -> None:
        if not self.notes:
            log.warning("training: %s", note)
        self.notes, self.costs = (f"training: {note}",), None


class CompiledPass:
    """One batch's forward and backward through the layers."""

    def __init__(
        self,
        layers: Mapping[Kept, Mapping[int, CompiledLayer]],
        tensors: Mapping[int, Sequence[Tensor]],
        running_pass: RunningPass,
    ) -> None:
        """`layers`: compiled functions by cut and layer; `tensors`: by layer, their inputs behind the hidden states."""
        self._layers, self._tensors, self._running_pass = layers, tensors, running_pass
        self._context = ForwardContext(training=running_pass)

    def has(self, kept: Kept) -> bool:
        """Whether the cut is compiled."""
        return kept in self._layers

    def forward(self, i: int, h_1TD: Tensor, kept: Kept, *, learns: bool = True) -> tuple[Tensor, list[object]]:
        """Layer i's output (1, T, D), rounded as that of the cut `kept`, and what its backward needs: nothing unless it
        `learns`."""
        layer = self._layers[kept][i]
        self._running_pass.begin_forward(layer.again if learns else None)
        with self._running(i):
            output_1TD, saved = layer.forward([h_1TD, *self._tensors[i]])
        return output_1TD, saved if learns else []

    def backward(
        self, i: int, saved: list[object], gradient_1TD: Tensor, kept: Kept, *, unread: bool = False
    ) -> Tensor:
        """The gradient of layer i's input; adds those of the adapters to their sums, and empties `saved`. `kept`: as in
        its forward. `unread`: the result may be anything."""
        layer = self._layers[kept][i]
        self._running_pass.begin_backward(layer.unread_sums if unread else frozenset())
        with self._running(i):
            return layer.backward(saved, gradient_1TD)

    @contextmanager
    def _running(self, i: int) -> Iterator[None]:
        with torch.no_grad(), running(self._context):
            current.layer = i
            yield


@dataclass(frozen=True)
class _Arguments:
    """What the model passes to a layer besides the hidden states: its tensors, and all else."""

    leaves: Sequence[object]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, call: LayerCall) -> _Arguments:
        return cls(*pytree.tree_flatten((call.args, call.kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def kind(self) -> Hashable:
        """Of what is no tensor; attention is the running pass's."""
        return tuple([_plain(leaf) for leaf in self.leaves]), repr(self.spec)

    @property
    def constants(self) -> tuple[list[object], pytree.TreeSpec]:
        """What is traced into a layer: all but its tensors and attention."""
        return [type(leaf) if isinstance(leaf, Tensor | PackedAttention) else leaf for leaf in self.leaves], self.spec

    def put(self, tensors: Sequence[Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The call's arguments with these tensors, and `AttendRows` for attention."""
        own = iter(tensors)
        leaves = [
            next(own) if isinstance(leaf, Tensor) else AttendRows() if isinstance(leaf, PackedAttention) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


NO_PASS = RunningPass(PackedAttention((0,)), None, ())
"""Of layers that are traced: nothing is computed."""


def _example_inputs(base: Base, cut: LayerCut, tokens: int) -> LayerInputs:
    positions_T = torch.arange(tokens, device=base.device) % EXAMPLE_ROW
    bounds = (*range(0, tokens, EXAMPLE_ROW), tokens)
    return cut.embed(probe.tokens(base.model, tokens), positions_T, PackedAttention(bounds))


def _mark(device: torch.device) -> Callable[[], None]:
    """A function that makes the stream which is current then wait for what the one that is current now has been
    given."""
    if device.type != "cuda":
        return lambda: None
    given = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(given)


def _wake_autograd(device: torch.device) -> None:
    """Autograd's thread for the device has no CUDA context before its first kernel, of which cuBLAS warns if it comes
    first."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.grad(leaf * leaf, leaf, torch.ones_like(leaf))


def _copies(layer: nn.Module, mesh: Mesh | None) -> tuple[nn.Module, nn.Module]:
    """The layer as it is traced, and to compare with. Of a rank's layer neither waits for the other ranks of the
    `mesh`."""
    if mesh is None:
        return (own := _copied(layer, {})), own
    meshes = TracedRanks(mesh.rank, mesh.size), LoneRank(mesh.rank, mesh.size)
    return _copied(layer, {id(mesh): meshes[0]}), _copied(layer, {id(mesh): meshes[1]})


def _copied(layer: nn.Module, instead: dict[int, object]) -> nn.Module:
    """The layer's modules with the same tensors, for another thread. `instead`: of other objects, by their ids."""
    tensors = [value for module in layer.modules() for value in vars(module).values()]
    for site in {id(one): one for module in layer.modules() if (one := shared_of(module)) is not None}.values():
        tensors += site.stacked.tensors
    known: dict[int, object] = {
        id(one): one for one in (*layer.parameters(), *layer.buffers(), *tensors) if isinstance(one, Tensor)
    }
    return copy.deepcopy(layer, known | instead)


def _plain(leaf: object) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return "attention" if isinstance(leaf, PackedAttention) else plain(leaf)


@dataclass(frozen=True)
class _Example:
    """A layer to trace, in modules of its own, and what it is called with."""

    layer: nn.Module
    plain: nn.Module
    """The same layer, to compare with."""
    call: LayerCall
    h_1TD: Tensor  # noqa: N815
    own: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.h_1TD, *_Arguments.of(self.call).tensors, *self.own.values()]

    @property
    def attention(self) -> PackedAttention:
        (found,) = [leaf for leaf in _Arguments.of(self.call).leaves if isinstance(leaf, PackedAttention)]
        return found

    def run(self, h_1TD: Tensor, *others: Tensor) -> Tensor:
        """The layer's output, traced: for `tensors`, or others like them."""
        arguments = _Arguments.of(self.call)
        count = len(arguments.tensors)
        args, kwargs = arguments.put(others[:count])
        own = dict(zip(self.own, others[count:], strict=True))
        with running(ForwardContext(training=NO_PASS)):
            output = torch.func.functional_call(self.layer, own, (h_1TD, *args), kwargs)
        h_next_1TD: Tensor = output[0] if isinstance(output, tuple) else output
        return h_next_1TD

    def expected(self, gradient_1TD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's own output, and the gradient of its input."""
        with torch.enable_grad(), running(ForwardContext()):
            leaf_1TD = self.h_1TD.detach().requires_grad_()
            output = self.plain(leaf_1TD, *self.call.args, **self.call.kwargs)
            h_next_1TD: Tensor = output[0] if isinstance(output, tuple) else output
            return h_next_1TD.detach(), torch.autograd.grad(h_next_1TD, leaf_1TD, gradient_1TD)[0]
