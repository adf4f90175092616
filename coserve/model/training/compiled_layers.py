"""A base's decoder layers compiled for training: forward and backward without autograd, one compiled pair for all
layers of a kind."""

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
from coserve.model.agreement import on_all_ranks
from coserve.model.base import Base
from coserve.model.experts.sites import has_experts
from coserve.model.faults import out_of_memory
from coserve.model.forward_context import ForwardContext, current, running
from coserve.model.groups import share_inputs
from coserve.model.layers import LayerCall, LayerCut, LayerInputs
from coserve.model.lora import SharedInput, shared_of
from coserve.model.parallel.mesh import LoneRank, Mesh
from coserve.model.probe.forward import check_tokens
from coserve.model.recurrent.seam import recurring
from coserve.model.training.kinds import kind_of, own_tensors, plain
from coserve.model.training.ops import AttendRows, TracedRanks
from coserve.model.training.recurrent_ops import RecurRows
from coserve.model.training.running_pass import AlonePass, RunningPass
from coserve.model.training.trace import Compile, CompiledLayer, TracedLayer, inductor, trace_layer

log = logging.getLogger(__name__)

EXAMPLE_TOKENS = 2039
"""Tokens of the traced batch: a prime, so that no other size equals it, and as large as real batches, for the kernels'
block sizes."""
EXAMPLE_ROW = 61
"""Tokens per sequence in the traced batch."""
CHECKED_TOKENS = 251
"""Tokens of the batch that checks the cuts of `compile_levels`: a prime, too, and small, since running jobs leave
little memory."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest relative error of a compiled layer, by dtype."""
FP8_TOLERANCE = 0.15
"""`TOLERANCE` where products round activations to FP8, whose mantissa of 3 bits enlarges differences in 16-bit
rounding. 0.055 was seen at an 8B shape."""
COMPARED_TOKENS = tuple(sorted({(1 << power) + more for power in range(18) for more in (-1, 0, 1)}))
"""Batch sizes at which the ranks compare whether their compiled layers accept them. (Not the conditions themselves:
layers loaded from disk may state the same ones differently.)"""
MAX_KINDS = 4
"""Most kinds of layers that are compiled. In a base with more, layers differ in constants of their computation."""


class CompiledLayers:
    """The compiled layers of a base. The constructor traces them; they are `ready` after `compile`, which may run on
    any thread. `compile_levels` adds the cuts of the joint graph that save less for the backward."""

    def __init__(
        self,
        base: Base,
        cut: LayerCut,
        compile: Compile = inductor,
        stream: Callable[[], AbstractContextManager[object]] = nullcontext,
        costs: Callable[[], TrainingCosts | None] = lambda: None,
    ) -> None:
        """Trace the layers, on the thread that runs the base: see `trace_layer`.

        `stream` enters the stream that training runs on. `costs` returns measured memory costs, if any, and is called
        once the layers are compiled. Ranks that share a base do this at the same time. Raises `UnsupportedBase`, with
        several ranks `FailedTogether`, and any error of stacking the weights, which cannot be undone.
        """
        if cut.untraced:
            raise UnsupportedBase(cut.untraced)
        if base.sharding is not None and base.sharding.experts:
            raise UnsupportedBase("the outputs of its experts are summed over the GPUs, which is not traced")
        if base.sharding is not None and base.sharding.norms:
            raise UnsupportedBase("means of its norms are summed over the GPUs, which is not traced")
        if not base.sites.shared():
            share_inputs(base)
        self._compile, self._stream, self._device = compile, stream, base.device
        rounds = base.spec.quantization == "fp8" and base.device.type == "cuda"
        self._tolerance = FP8_TOLERANCE if rounds else TOLERANCE[base.dtype]
        self._mesh = None if base.sharding is None else base.sharding.mesh
        self.cut = cut
        self._load_costs = costs
        self.costs: TrainingCosts | None = None
        """Memory costs for planning jobs. None if they are unknown, or if a batch was refused, as others may be,
        too."""
        self.notes: tuple[str, ...] = ()
        """Describes the last batch that the compiled layers refused, for an operator."""
        self._compiled: dict[Kept, dict[Hashable, CompiledLayer]] = {}
        self._traced = on_all_ranks(self._mesh, base.device, lambda: self._trace(base), self._order_of_kinds)
        self._wait_for_examples = _mark(base.device)

    def _trace(self, base: Base) -> dict[Hashable, TracedLayer]:
        """Trace a layer of each kind. Raises `UnsupportedBase`."""
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
        self._few: dict[Hashable, _Example] = {}  # with fewer tokens
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
        """Compile the layers. Other threads may capture CUDA graphs meanwhile, so this never waits for the whole
        device.

        Ranks that share a base do this at the same time. Raises `UnsupportedBase`, and errors of the compiler; with
        several ranks `FailedTogether`. After a lack of memory it may be called again.
        """
        compiled = self._compile_cut(Kept.ALL)
        if self._mesh is not None:
            self.forget_examples()
        self.costs = self._load_costs()
        self._compiled = {Kept.ALL: compiled}

    def compile_levels(self, costs: TrainingCosts | None = None) -> None:
        """Compile the cuts that keep less, after `compile` and under the same conditions.

        `costs`: memory costs including these cuts; None: they are measured next. Raises `UnsupportedBase`.
        """
        if self._mesh is not None:
            raise UnsupportedBase("ranks share the base")
        lean = {kept: self._compile_cut(kept) for kept in (Kept.ATTENTION, Kept.INPUT)}
        self.forget_examples()
        self._compiled = self._compiled | lean
        if costs is not None and not self.notes:
            self.costs = costs

    def forget_examples(self) -> None:
        """Free the examples that `compile` and `compile_levels` need."""
        self._examples, self._few, self._traced = {}, {}, {}

    def _compile_cut(self, kept: Kept) -> dict[Hashable, CompiledLayer]:
        found = dict[Hashable, CompiledLayer]()

        def compile_all() -> list[str]:
            """Return what must be equal on all ranks: the order of collectives in the compiled code, accepted batch
            sizes, and sums that may be left out."""
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

        try:
            on_all_ranks(self._mesh, self._device, compile_all, repr)
        except BaseException as error:
            if not out_of_memory(error):  # without memory, it may be tried again
                self.forget_examples()
            raise
        return found

    def _check(self, i: int, example: _Example, compiled: CompiledLayer) -> list[str]:
        """Check a compiled layer, and return its collectives in order. It runs on this rank alone: a sum returns the
        rank's own summand.

        Raises `UnsupportedBase` if a compiled layer computes something else than the layer does.
        """
        h_1TD, attention = example.h_1TD, example.attention
        tensors = {i: [*_Arguments.of(example.call).tensors, *example.own.values()]}
        running_pass = AlonePass(attention, self._groups)
        one = CompiledPass({Kept.ALL: {i: compiled}}, tensors, running_pass)
        output_1TD, saved = one.forward(i, h_1TD, Kept.ALL)
        gradient_1TD = torch.ones_like(h_1TD)
        found = output_1TD, one.backward(i, saved, gradient_1TD, Kept.ALL)
        expected = example.expected(gradient_1TD)
        routed = any(has_experts(module) for module in example.layer.modules())
        for what, own, right in zip(("output", "gradient"), found, expected, strict=True):
            if not (error := relative_error(own, right, routed=routed)) <= self._tolerance:
                raise UnsupportedBase(f"the compiled layer {i} gives another {what}: relative error {error:.2g}")
        return running_pass.collectives

    @property
    def may_keep_less(self) -> bool:
        """Whether this base supports `compile_levels`."""
        return self._mesh is None

    @property
    def ready(self) -> bool:
        """Whether the layers are compiled."""
        return bool(self._compiled)

    @property
    def cuts(self) -> frozenset[Kept]:
        """The compiled cuts."""
        return frozenset(self._compiled)

    def sites_kept(self, kept: Kept) -> frozenset[str]:
        """Return the sites whose x Aᵀ is kept for the backward under this cut; it is recomputed for the others."""
        compiled = self._compiled[kept]
        return frozenset(
            name
            for kind, groups in zip(self._kinds, self._groups, strict=True)
            for shared in groups
            if shared.index not in compiled[kind].again.groups
            for name in shared.group.names
        )

    def begin(self, inputs: LayerInputs, lora: PreparedLora | None) -> CompiledPass | None:
        """Begin a forward and backward of the layers. None if they are not compiled, or were traced for other batches.

        `lora`: its pairs have `MainGrads`, unless there is no backward.
        """
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
        """`layers`: compiled functions by cut and layer; `tensors`: each layer's inputs after the hidden states."""
        self._layers, self._tensors, self._running_pass = layers, tensors, running_pass
        self._context = ForwardContext(training=running_pass)

    def has(self, kept: Kept) -> bool:
        """Whether the cut is compiled."""
        return kept in self._layers

    def forward(self, i: int, h_1TD: Tensor, kept: Kept, *, learns: bool = True) -> tuple[Tensor, list[object]]:
        """Return layer i's output (1, T, D), rounded as in the cut `kept`, and the tensors saved for its backward.

        Nothing is saved unless it `learns`.
        """
        layer = self._layers[kept][i]
        self._running_pass.begin_forward(layer.again if learns else None)
        with self._running(i):
            output_1TD, saved = layer.forward([h_1TD, *self._tensors[i]])
        return output_1TD, saved if learns else []

    def backward(
        self, i: int, saved: list[object], gradient_1TD: Tensor, kept: Kept, *, unread: bool = False
    ) -> Tensor:
        """Return the gradient of layer i's input; add those of the adapters to their sums, and empty `saved`.

        `kept`: as in its forward. `unread`: the result is not used and may be anything.
        """
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
    """The model's arguments to a layer besides the hidden states: tensors, and everything else."""

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
        """Key of the arguments that are no tensors. Attention is left out, as it is the running pass's."""
        return tuple([_plain(leaf) for leaf in self.leaves]), repr(self.spec)

    @property
    def constants(self) -> tuple[list[object], pytree.TreeSpec]:
        """The constants that are traced into a layer: all arguments but tensors and attention."""
        return [type(leaf) if isinstance(leaf, Tensor | PackedAttention) else leaf for leaf in self.leaves], self.spec

    def put(self, tensors: Sequence[Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the call's arguments with these tensors, and with `AttendRows` for attention."""
        own = iter(tensors)
        leaves = [
            next(own) if isinstance(leaf, Tensor) else AttendRows() if isinstance(leaf, PackedAttention) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


NO_PASS = RunningPass(PackedAttention((0,)), None, ())
"""Placeholder while layers are traced; it computes nothing."""


def _example_inputs(base: Base, cut: LayerCut, tokens: int) -> LayerInputs:
    positions_T = torch.arange(tokens, device=base.device) % EXAMPLE_ROW
    bounds = (*range(0, tokens, EXAMPLE_ROW), tokens)
    return cut.embed(check_tokens(base.model, tokens), positions_T, PackedAttention(bounds))


def _mark(device: torch.device) -> Callable[[], None]:
    """Return a function that makes the stream current at its call wait for the work queued so far on this one."""
    if device.type != "cuda":
        return lambda: None
    given = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(given)


def _wake_autograd(device: torch.device) -> None:
    """Run a backward once, to give autograd's thread a CUDA context. cuBLAS warns if its call is the thread's first."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.grad(leaf * leaf, leaf, torch.ones_like(leaf))


def _copies(layer: nn.Module, mesh: Mesh | None) -> tuple[nn.Module, nn.Module]:
    """Return copies of the layer to trace and to compare with. Neither waits for the other ranks of the `mesh`."""
    if mesh is None:
        return (own := _copied(layer, {})), own
    meshes = TracedRanks(mesh.rank, mesh.size), LoneRank(mesh.rank, mesh.size)
    return _copied(layer, {id(mesh): meshes[0]}), _copied(layer, {id(mesh): meshes[1]})


def _copied(layer: nn.Module, instead: dict[int, object]) -> nn.Module:
    """Copy the layer's modules, but not their tensors, for another thread. `instead`: replacements of other objects, by
    id."""
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


def relative_error(found_1TD: Tensor, right_1TD: Tensor, *, routed: bool) -> float:
    """Return the norm of the difference over that of `right_1TD`. `routed`: tokens choose experts. Rounding sends a few
    to others, so the quarter of the tokens that differ most does not count."""
    off_T, size_T = ((x_1TD.float().norm(dim=-1).flatten()) for x_1TD in (found_1TD - right_1TD, right_1TD))
    if routed:
        counted = off_T.argsort()[: -(-3 * len(off_T) // 4)]
        off_T, size_T = off_T[counted], size_T[counted]
    return float(off_T.norm() / size_T.norm())


@dataclass(frozen=True)
class _Example:
    """A layer to trace, in modules of its own, and its inputs."""

    layer: nn.Module
    plain: nn.Module
    """A copy of the layer to compare with."""
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
        """Return the layer's output for `tensors`, or others of their shapes; this function is traced."""
        arguments = _Arguments.of(self.call)
        count = len(arguments.tensors)
        args, kwargs = arguments.put(others[:count])
        own = dict(zip(self.own, others[count:], strict=True))
        with running(ForwardContext(training=NO_PASS)), recurring(RecurRows()):
            output = torch.func.functional_call(self.layer, own, (h_1TD, *args), kwargs)
        h_next_1TD: Tensor = output[0] if isinstance(output, tuple) else output
        return h_next_1TD

    def expected(self, gradient_1TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's own output, and the gradient of its input."""
        with torch.enable_grad(), running(ForwardContext()), recurring(self.attention.recurrence):
            leaf_1TD = self.h_1TD.detach().requires_grad_()
            output = self.plain(leaf_1TD, *self.call.args, **self.call.kwargs)
            h_next_1TD: Tensor = output[0] if isinstance(output, tuple) else output
            return h_next_1TD.detach(), torch.autograd.grad(h_next_1TD, leaf_1TD, gradient_1TD)[0]
