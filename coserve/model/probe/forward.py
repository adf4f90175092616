"""Runs a model's own forward, whose logits and hidden states the hooked model must reproduce.

The checks at start accept a family that works through the hooks at attention and linear sites, and refuse any other
with the reason. No family is known by name. A model is observed (`observe`): the masks that it would have used, and
which linear modules see every token. Then the hooked model is compared with the model's own forward (`compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.core.errors import UnsupportedBase

SEQUENCES = (13, 6)
"""Lengths of the sequences that the checks run."""


@dataclass(frozen=True)
class Forward:
    """The logits (T, V) of a forward, and for each module of a stack of layers the hidden states (T, D) before and
    after."""

    logits: Tensor
    states: Mapping[nn.Module, tuple[Tensor, Tensor]]

    def flip(self) -> Forward:
        """Return the same with the tokens in reverse order."""
        states = {module: (before.flip(0), after.flip(0)) for module, (before, after) in self.states.items()}
        return Forward(self.logits.flip(0), states)


def join_streams(hidden: Tensor) -> Tensor:
    """Return hidden states as (1, T, D), or as (1, T, S D) where a token has several, (S, 1, T, D)."""
    return hidden if hidden.dim() == 3 else hidden.permute(1, 2, 0, 3).flatten(2)


def part_streams(h_1TD: Tensor, streams: int) -> Tensor:
    """Invert `join_streams`."""
    return h_1TD if streams == 1 else h_1TD.reshape(*h_1TD.shape[:2], streams, -1).permute(2, 0, 1, 3)


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[Callable[[Tensor], Forward]]:
    """Record the modules' forwards inside. Yields a function that adds the logits and returns the record.

    Several forwards in sequence are recorded as one forward of all their tokens.
    """
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def saw(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        before, after = hidden_states(args, kwargs), output[0] if isinstance(output, tuple) else output
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.dim() == after.dim() in (3, 4):
            seen.setdefault(module, []).append((join_streams(before)[0], join_streams(after)[0]))

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(saw, with_kwargs=True))
        yield lambda logits: Forward(
            logits,
            {
                module: (torch.cat([before for before, _ in own]), torch.cat([after for _, after in own]))
                for module, own in seen.items()
            },
        )


def hidden_states(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Return the hidden states among a layer's arguments."""
    return args[0] if args else kwargs.get("hidden_states")


def eager_forward(model: PreTrainedModel) -> tuple[Forward, dict[str, nn.Module]]:
    """Run the model's own forward on each of the check's sequences separately.

    Also returns the possible sites: the linear modules and embeddings, by path, that saw every token exactly once and
    returned one tensor (some routers of experts return more).
    """
    family, rows, logits = model.config.model_type, [], []
    count = model.config.get_text_config().num_hidden_layers
    stacks = [stack for stack in model.modules() if isinstance(stack, nn.ModuleList) and len(stack) == count]
    calls: dict[str, list[int]] = {}
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)
    }

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], object], None]:
        def saw(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
            seen = args[0] if isinstance(module, nn.Embedding) else args[0][..., 0]
            calls.setdefault(name, []).append(seen.numel() if isinstance(output, Tensor) else 0)

        return saw

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(watch(name)))
        try:
            with use_attention(model, "eager"), torch.no_grad(), recorded(chain.from_iterable(stacks)) as forward:
                for length in SEQUENCES:
                    logits.append(model(**check_inputs(model, length)).logits[0])
                    rows.append(length)
        except (TypeError, AttributeError, ValueError, KeyError, RuntimeError) as error:
            raise UnsupportedBase(f"{family} does not run with eager attention: {error}") from error
    return forward(torch.cat(logits)), {name: module for name, module in modules.items() if calls.get(name) == rows}


def check_tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Return fixed token ids (length,) for a check."""
    vocab: int = model.config.get_text_config().vocab_size
    return (torch.arange(1, length + 1, device=model.device) * 7919) % vocab


def check_inputs(model: PreTrainedModel, length: int) -> dict[str, Tensor | bool]:
    """Return the arguments of the model's own forward on one sequence of `check_tokens`."""
    positions = torch.arange(length, device=model.device)[None]
    return {"input_ids": check_tokens(model, length)[None], "position_ids": positions, "use_cache": False}


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch the model to another attention implementation inside."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
