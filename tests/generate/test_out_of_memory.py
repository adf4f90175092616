"""Memory that runs out while tokens are generated: the step is undone and done again in smaller parts, with the same
tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coserve.core.errors import RequestOutOfMemory
from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.generate.execution import eager as eager_module
from coserve.generate.execution import graph_executor
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.graphs.decode import DecodeGraph
from coserve.generate.execution.graphs.graph_set import LeftOut
from coserve.generate.execution.graphs.mixed import MixedGraph
from coserve.generate.execution.token_slots import TokenSlots
from coserve.generate.generator import Generator
from coserve.generate.plan import LONGEST, PATIENCE, StepBudget
from coserve.generate.sampling import device_sampler
from coserve.generate.sampling.choices import Chosen
from coserve.kernels.lora.segmented.adapter_table import Slots
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from tests.support.examples import examples
from tests.support.executors import eager, graphs
from tests.support.generation import GREEDY, Answer, adapter, answers, prompt, request
from tests.support.memory_faults import Faults, Point, out_of_memory_at
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

KINDS = (
    GREEDY,
    SamplingParams(max_tokens=7, temperature=1.5, seed=3, logprobs=1),
    SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.3),
    SamplingParams(max_tokens=3, temperature=0.9, prompt_logprobs=1, seed=2),
    SamplingParams(max_tokens=6, temperature=1.2, top_p=0.9, frequency_penalty=0.4, seed=5),
)
REFS = (None, AdapterRef("one", 1), AdapterRef("two", 1))


@cache
def base() -> Base:
    return wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())


@cache
def fused() -> FusedBase:
    return FusedBase(base(), compiled=False)


@cache
def shelf() -> Shelf:
    return Shelf({ref: adapter(base(), i, 3 + i) for i, ref in enumerate(REFS) if ref is not None})


def asked(*, ahead: bool) -> list[Generate]:
    """With adapters where no kernel of theirs must be interpreted."""
    refs = (None,) if ahead else REFS
    return [request(str(i), prompt(4 + 9 * i), kind, refs[i % len(refs)]) for i, kind in enumerate(KINDS)]


def generator(*, ahead: bool, tokens: int = 256, step_tokens: int = 48) -> Generator:
    kv = KvCache.for_base(base(), tokens, 16)
    executor = graphs(fused(), kv, max_running=4) if ahead else eager(base(), kv)
    return Generator(base(), shelf().store(), kv, executor, max_running=4, step_tokens=step_tokens)


def points(*, ahead: bool) -> list[Point]:
    """Whatever allocates in a step: its inputs, each layer, the choice of tokens, what the next step needs of them."""
    layers = (type(base().layers[0]), "forward")
    if not ahead:
        return [layers, (eager_module, "pack"), (eager_module, "choose"), (eager_module, "prompt_logprobs")]
    sampler = [(device_sampler, name) for name in ("decide", "send_ids")]
    history = [(device_sampler.History, name) for name in ("empty", "_write")]
    executor = [(TokenSlots, "fill"), (TokenSlots, "store"), (Chosen, "fetch"), (graph_executor, "pack")]
    return [(FusedBase, "forward"), layers, *sampler, *history, *executor]


def finish(gen: Generator, requests: list[Generate]) -> dict[str, Answer]:
    found = answers(gen, requests)
    assert not +shelf().held
    return found


def run(ahead: bool, wanted: Callable[[int], bool], **options: Any) -> tuple[dict[str, Answer], Faults, Generator]:
    gen = generator(ahead=ahead)
    with out_of_memory_at(points(ahead=ahead), wanted, **options) as faults:
        return finish(gen, asked(ahead=ahead)), faults, gen


@cache
def clean(ahead: bool) -> tuple[dict[str, Answer], int]:
    """What is said without faults, and the calls of `points`."""
    said, faults, gen = run(ahead, lambda call: False)
    assert not gen.troubles
    return said, faults.calls


@settings(max_examples=examples(12))
@example(where=[0.875, 0.8125], after=False, ahead=False)
@given(
    where=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=2), after=st.booleans(), ahead=st.booleans()
)
def test_faults_anywhere_change_no_token(where: list[float], after: bool, ahead: bool) -> None:
    """Log-probabilities neither, up to the rounding of another batch. No page or adapter stays behind."""
    expected, calls = clean(ahead)
    at = {int(share * calls) for share in where}
    said, faults, gen = run(ahead, lambda call: call in at, after=after)
    assert faults.failed
    assert all("memory ran out" in one for one in gen.troubles)  # none: the step had one token, and was tried once more
    refused = {id for id, answer in said.items() if answer.failed == RequestOutOfMemory.code}
    assert len(refused) <= len(at) // 2  # its step of one token failed twice in a row
    for id in said.keys() - refused:
        assert said[id].rounded == expected[id].rounded if ahead else said[id] == expected[id]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_of_one_token_that_does_not_fit_ends_its_request_alone(ahead: bool) -> None:
    """Memory is gone for good: every request gets a typed error, and the next one after that is served."""
    gen = generator(ahead=ahead)
    with out_of_memory_at([(Base, "forward"), (FusedBase, "forward")], lambda call: True):
        said = finish(gen, asked(ahead=ahead))
    assert all(answer.failed == RequestOutOfMemory.code for answer in said.values())
    assert "memory ran out" in gen.troubles[0]
    assert finish(gen, asked(ahead=ahead)[:1])["0"] == clean(ahead)[0]["0"]


def test_the_latest_give_way_to_the_earliest_while_memory_is_short() -> None:
    """Three decodes do not fit, two do: the third waits, and goes on later."""
    requests = [request(str(i), prompt(5, seed=i), SamplingParams(max_tokens=20, temperature=0.0)) for i in range(4)]
    expected = finish(generator(ahead=False), requests)
    gen, forward = generator(ahead=False), Base.forward
    most = list[int]()

    def limited(self: Base, tokens_T: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(tokens_T) > 2:
            raise torch.OutOfMemoryError
        most.append(len(tokens_T))
        return forward(self, tokens_T, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Base, "forward", limited)
        assert finish(gen, requests) == expected
    assert gen.scheduler.preemptions > 0
    assert max(most) == 2


def test_after_a_shortage_a_prompt_takes_as_many_steps_as_policies_are_told() -> None:
    gen, forward = generator(ahead=False), Base.forward

    def limited(self: Base, tokens_T: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(tokens_T) > 12:
            raise torch.OutOfMemoryError
        return forward(self, tokens_T, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Base, "forward", limited)
        gen.add(request("r", prompt(40), GREEDY))
        while gen.scheduler.budget.tokens > 12:
            assert gen.step() == []
        plan = gen.scheduler.propose()
        (due,) = plan.deadlines.view()
        assert (due.steps, plan.step_tokens, plan.admitting_nobody.prefill) == (4, 10, 10)
        steps = 1
        while not gen.step():
            steps += 1
    assert steps == due.steps


def test_an_adapter_whose_slot_found_no_memory_is_placed_again() -> None:
    slots, ref = AdapterSlots(fused().groups, 2, torch.device("cpu")), AdapterRef("one", 1)
    with out_of_memory_at([(Slots, "put")], lambda call: True), pytest.raises(torch.OutOfMemoryError):
        slots.place({ref: shelf().weights[ref]})
    with out_of_memory_at([(Slots, "put")], lambda call: False) as faults:
        assert slots.place({ref: shelf().weights[ref]}) == slots.place({ref: shelf().weights[ref]})
    assert faults.calls == 1


def test_the_budget_grows_back_slowly() -> None:
    budget = StepBudget(64)
    budget.lower(40)
    assert (budget.tokens, budget.lowered) == (20, True)
    for _ in range(PATIENCE):
        budget.succeeded()
    assert budget.tokens == 40
    budget.lower(40)
    for _ in range(2 * PATIENCE - 1):
        budget.succeeded()
    assert budget.tokens == 20
    for _ in range(1 + 4 * PATIENCE):
        budget.succeeded()
    assert (budget.tokens, budget.lowered) == (64, False)
    for _ in range(20):
        budget.lower(1)
    assert budget.tokens == 1
    for _ in range(6 * LONGEST):
        budget.succeeded()
    assert not budget.lowered


def test_a_graph_that_other_ranks_have_is_not_left_out() -> None:
    left_out = LeftOut(torch.device("cpu"), tolerated=False)
    with pytest.raises(torch.OutOfMemoryError), left_out.capturing("a graph"):
        raise torch.OutOfMemoryError("no memory")
    assert not left_out


def test_a_graph_whose_capture_finds_no_memory_is_left_out() -> None:
    """Its steps run without it, and nobody tries again."""
    requests = [request(str(i), prompt(5, seed=i), GREEDY) for i in range(3)]
    expected = finish(generator(ahead=True), requests)
    for owner in (DecodeGraph, MixedGraph):
        gen = generator(ahead=True)
        with out_of_memory_at([(owner, "capture")], lambda call: True) as faults:
            while gen.prepare():
                pass
            tried = faults.failed
            assert finish(gen, requests) == expected
            assert not gen.prepare()
        assert tried == faults.failed > 0
        assert any(f"{tried} CUDA graphs are left out" in note for note in gen.troubles)


def test_a_graph_whose_capture_fails_is_left_out_whatever_it_raised() -> None:
    """A kernel that does not compile on this GPU, for example: the engine would die of it again after each restart."""
    requests = [request(str(i), prompt(5, seed=i), GREEDY) for i in range(3)]
    expected = finish(generator(ahead=True), requests)
    gen = generator(ahead=True)
    with out_of_memory_at([(MixedGraph, "capture")], lambda call: True, error=ZeroDivisionError):
        while gen.prepare():
            pass
        assert finish(gen, requests) == expected
    assert any("CUDA graphs are left out, as their capture failed" in note for note in gen.troubles)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_of_a_launch_ends_its_requests_alone(ahead: bool) -> None:
    gen, other = generator(ahead=ahead), request("other", prompt(5, seed=2), GREEDY)
    expected = finish(generator(ahead=ahead), [other])
    gen.add(request("one", prompt(5, seed=1), GREEDY))
    gen.step()
    with out_of_memory_at(
        [(GraphExecutor if ahead else EagerExecutor, "launch")], lambda call: True, error=ZeroDivisionError
    ):
        failed = [message for message in gen.step() if isinstance(message, RequestFailed)]
    assert [(message.id, message.code) for message in failed] == [("one", "internal_error")]
    assert finish(gen, [other]) == expected
