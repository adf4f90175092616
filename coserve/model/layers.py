"""The unmodified model cut into embedding, decoder layers and head, between which fine-tuning can suspend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from coserve.core.errors import UnsupportedBase
from coserve.kernels.attention.interface import Attention
from coserve.model import seam
from coserve.model.base import Base
from coserve.model.faults import out_of_memory
from coserve.model.probe.compare import check_equal
from coserve.model.probe.forward import SEQUENCES, check_tokens, join_streams, part_streams
from coserve.model.seam import ReferenceAttention


@dataclass(frozen=True)
class LayerCall:
    """The arguments that the model passes to one layer, besides the hidden states: rotary tables, positions,
    attention."""

    args: tuple[object, ...]
    kwargs: dict[str, object]


@dataclass(frozen=True)
class LayerInputs:
    """A packed batch after `embed`: the inputs of the layers, usable for any number of forwards and backwards."""

    tokens_T: Tensor  # noqa: N815
    positions_T: Tensor  # noqa: N815
    attention: Attention
    h_1TD: Tensor  # noqa: N815
    """Hidden states that enter layer 0. If a token has several (Gemma 3n), D holds them side by side."""
    calls: tuple[LayerCall, ...]

    def learned(self, i: int) -> list[Tensor]:
        """Return the arguments of layer i, besides the hidden states, that need gradients."""
        call = self.calls[i]
        found = tree_leaves((call.args, call.kwargs))
        return [one for one in found if isinstance(one, Tensor) and one.requires_grad]


class LayerCut:
    """Runs a base in pieces whose composition equals the model's own forward.

    Every piece runs under the caller's gradient mode and forward context; nothing is padded.
    """

    def __init__(self, base: Base) -> None:
        """Raises `UnsupportedBase` if embed -> layers -> head does not give the model's own logits."""
        self._base = base
        self._tuple_size = [0] * len(base.layers)
        self.kv_sources = {i: one.source for i, one in enumerate(base.kv_shapes) if one.source is not None}
        """The layer whose keys and values a layer reads, for those that have none of their own."""
        self._streams = base.spec.streams
        self.untraced = f"its layers pass on {self._streams} hidden states of a token" if self._streams > 1 else ""
        """Why `CompiledLayers` does not take the layers; empty if it does."""
        if self.kv_sources:
            self.untraced = "its last layers read the keys and values of earlier ones"
        self.reads_logits = False
        """Whether the head's backward reads the logits that the head returned, which must then not be overwritten
        before it."""
        self._check()

    def embed(
        self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, *, gradient: bool = False
    ) -> LayerInputs:
        """Run the model's own forward of T packed tokens up to layer 0, and record each layer's arguments. `gradient`:
        what enters layer 0 is differentiable in the adapters of the embedding."""
        calls: list[LayerCall] = []
        entering: list[Tensor] = []

        def record(layer: int, hidden: Tensor, call: LayerCall) -> Tensor:
            calls.append(call)
            entering.append(hidden)
            return hidden

        with self._stubs(record), torch.set_grad_enabled(gradient):
            self._base.run(tokens_T, positions_T, attention, keep=tokens_T.new_zeros(1))
        return LayerInputs(tokens_T, positions_T, attention, join_streams(entering[0]), tuple(calls))

    def layer(self, i: int, h_1TD: Tensor, inputs: LayerInputs, attention: Attention | None = None) -> Tensor:
        """Run layer i's own forward: hidden states (1, T, D) in and out. `attention`: instead of the batch's."""
        call = inputs.calls[i]
        kwargs = call.kwargs if attention is None else call.kwargs | {seam.ARGUMENT: attention}
        with self._base.recurring(inputs.attention):
            output = self._base.layers[i](part_streams(h_1TD, self._streams), *call.args, **kwargs)
        return join_streams(output[0] if isinstance(output, tuple) else output)

    def head(self, h_1KD: Tensor, inputs: LayerInputs, keep_K: Tensor, *, gather: bool = True) -> Tensor:
        """Return the logits (K, V) of K tokens, given the last layer's output at these tokens.

        `keep_K`: their rows. `gather`: see `Base.run`. Runs the model's own forward with every layer replaced, so that
        its final norm, scaling and soft cap apply.
        """

        def put(layer: int, passing: Tensor, call: LayerCall) -> Tensor:
            return part_streams(h_1KD, self._streams) if layer == 0 else passing

        tokens_K, positions_K = inputs.tokens_T[keep_K], inputs.positions_T[keep_K]
        with self._stubs(put):
            return self._base.run(tokens_K, positions_K, inputs.attention, keep=None, gather=gather)

    @contextmanager
    def _stubs(self, run: Callable[[int, Tensor, LayerCall], Tensor]) -> Iterator[None]:
        """Replace each layer's forward by `run(layer, hidden, call)` inside."""

        def stub(layer: int) -> Callable[..., object]:
            def forward(*args: object, **kwargs: object) -> object:
                hidden, *rest = args if args else (kwargs.pop("hidden_states"),)
                assert isinstance(hidden, Tensor)
                output = run(layer, hidden, LayerCall(tuple(rest), kwargs))
                size = self._tuple_size[layer]
                return (output, *[None] * (size - 1)) if size else output

            return forward

        layers = self._base.layers
        before = [layer.__dict__.get("forward") for layer in layers]
        try:
            for i, layer in enumerate(layers):
                layer.forward = stub(i)
            yield
        finally:
            for layer, forward in zip(layers, before, strict=True):
                if forward is None:
                    del layer.forward
                else:
                    layer.forward = forward

    def _check(self) -> None:
        base, length = self._base, SEQUENCES[0]
        tokens_T, positions_T = check_tokens(base.model, length), torch.arange(length, device=base.device)
        attention, family = ReferenceAttention((0, length)), base.spec.family

        def learn(i: int) -> Callable[[nn.Module, tuple[object, ...], object], None]:
            def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
                self._tuple_size[i] = len(output) if isinstance(output, tuple) else 0

            return hook

        with ExitStack() as hooks, torch.no_grad():
            for i, layer in enumerate(base.layers):
                hooks.enter_context(layer.register_forward_hook(learn(i)))
            expected_TV = base.run(tokens_T, positions_T, attention, keep=None)
        try:
            with torch.no_grad():
                inputs = self.embed(tokens_T, positions_T, attention)
                h_1TD = inputs.h_1TD
                for i in range(len(base.layers)):
                    h_1TD = self.layer(i, h_1TD, inputs)
                keep_K = torch.arange(0, length, 2, device=base.device)
                h_1KD = h_1TD[:, keep_K]
                got_KV = self.head(h_1KD, inputs, keep_K)
            self.reads_logits = self._backward_reads_logits(h_1KD, inputs, keep_K)
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            raise UnsupportedBase(f"{family} cannot be run layer by layer: {error}") from error
        check_equal(f"{family}, layer by layer", got_KV, expected_TV[keep_K])

    def _backward_reads_logits(self, h_1KD: Tensor, inputs: LayerInputs, keep_K: Tensor) -> bool:
        saved = set[int]()

        def note(tensor: Tensor) -> Tensor:
            saved.add(tensor.untyped_storage()._cdata)
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            logits_KV = self.head(h_1KD.detach().requires_grad_(), inputs, keep_K, gather=False)
            return logits_KV.untyped_storage()._cdata in saved
