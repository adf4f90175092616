"""Generation against `model.generate`, and against itself: what runs beside a request changes none of its bits."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from coserve.core.errors import AdapterNotFound, EmptyPrompt, InvalidRequest, PromptTooLong
from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, FinishReason
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.types import LoraPair
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from tests.support.examples import by_day, in_turns
from tests.support.generation import Answer, adapter, answers, make_generator, prompt, request
from tests.support.lora_backends import GROUPED, NAIVE, REFERENCE
from tests.support.shelf import Shelf
from tests.support.tiny_models import CONTEXT, FAMILIES, VOCAB, tiny_model

LENGTHS = (3, 17, 40, 1)
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@cache
def base_of(family: str) -> Base:
    return wrap_base(tiny_model(family), name=family, eos_token_ids=())


def alone(base: Base, one: Generate, shelf: Shelf | None = None) -> Answer:
    return answers(make_generator(base, shelf), [one])[one.id]


@pytest.mark.parametrize("family", in_turns(FAMILIES, ("llama", "gpt2")))
def test_greedy_equals_generate(family: str) -> None:
    """Alone, mixed, in chunks of 7 tokens, and in a pool too small for all."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")  # others drop Gemma 2's softcap
    base = base_of(family)
    requests = [request(str(n), prompt(n), GREEDY) for n in LENGTHS]
    expected = {}
    for one in requests:
        ids = torch.tensor([one.prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected[one.id] = out[0, len(one.prompt) :].tolist()
    assert {one.id: alone(base, one).tokens for one in requests} == expected
    for gen in (
        make_generator(base),
        make_generator(base, step_tokens=7),
        make_generator(base, tokens=72, page_tokens=4),
    ):
        assert {id: result.tokens for id, result in answers(gen, requests).items()} == expected
    assert gen.scheduler.preemptions > 0


def sampled(base: Base, refs: list[AdapterRef]) -> list[Generate]:
    chance = random.Random(7)
    return [
        request(
            f"r{i}",
            prompt(chance.choice((1, 5, 30, 70)), i),
            SamplingParams(
                max_tokens=chance.randint(1, 24),
                temperature=chance.choice((0.0, 0.8, 1.3)),
                top_p=chance.choice((1.0, 0.9)),
                top_k=chance.choice((0, 20)),
                repetition_penalty=chance.choice((1.0, 1.2)),
                logprobs=2,
                seed=i,
            ),
            chance.choice([None, *refs]),
        )
        for i in range(12)
    ]


@pytest.mark.parametrize("family", by_day(["gpt2", "gemma2"], "gpt2"))
def test_neighbours_chunks_and_preemptions_change_no_bit(family: str) -> None:
    """Tokens and log-probabilities: a request with an adapter, or none, alone and in any company."""
    base = base_of(family)
    refs = [AdapterRef("a", 1), AdapterRef("a", 2), AdapterRef("b", 1)]
    suffixes = tuple(base.spec.default_targets)
    weights = [adapter(base, 1, 4), adapter(base, 2, 1, suffixes[:1]), adapter(base, 3, 9, suffixes[-2:])]
    shelf = Shelf(dict(zip(refs, weights, strict=True)))
    requests = sampled(base, refs)
    expected = {one.id: alone(base, one, shelf) for one in requests}
    assert len({tuple(result.tokens) for result in expected.values()}) > 8
    preemptions = 0
    for shape in (
        {},
        {"step_tokens": 9, "page_tokens": 5},
        {"tokens": 160, "page_tokens": 3},
        {"max_running": 2},
        {"lora_backend": NAIVE},
    ):
        gen = make_generator(base, shelf, **shape)
        assert answers(gen, requests) == expected, shape
        preemptions += gen.scheduler.preemptions
    assert preemptions > 0
    assert not +shelf.held


@pytest.mark.slow
def test_two_threads_change_no_bit() -> None:
    base = base_of("llama")
    requests = [request(f"r{i}", prompt(n, i), SamplingParams(max_tokens=6, seed=i)) for i, n in enumerate((3, 40, 17))]
    torch.set_num_threads(2)
    expected = {one.id: alone(base, one) for one in requests}
    assert answers(make_generator(base, step_tokens=30), requests) == expected


def test_arrivals_and_cancels_in_the_middle_change_nothing_and_leave_nothing() -> None:
    base, chance = base_of("llama"), random.Random(3)
    ref = AdapterRef("a", 1)
    shelf = Shelf({ref: adapter(base, 1, 2)})
    gen = make_generator(base, shelf, tokens=300, page_tokens=4, step_tokens=20, max_running=6)
    watched = request("watched", prompt(20), SamplingParams(max_tokens=30, seed=3), ref)
    gen.add(watched)
    got: list[int] = []
    live: list[str] = []
    for i in range(90):
        if chance.random() < 0.4:
            id = f"n{i}"
            sampling = SamplingParams(max_tokens=chance.randint(1, 40), seed=i)
            gen.add(request(id, prompt(chance.randint(1, 60), i), sampling, chance.choice([None, ref])))
            live.append(id)
        if live and chance.random() < 0.35:
            gen.cancel(live.pop(chance.randrange(len(live))))
        for message in gen.step():
            assert isinstance(message, Tokens)
            if message.id == "watched":
                got += message.tokens
    for id in live:
        gen.cancel(id)
    gen.cancel("watched")
    assert gen.running == gen.pages_used == 0
    assert not +shelf.held
    assert got == alone(base, watched, shelf).tokens


def test_cancel_frees_pages_at_once_and_may_come_late() -> None:
    gen = make_generator(base_of("llama"), page_tokens=4)
    gen.add(request("x", prompt(9), GREEDY))
    gen.step()
    assert (gen.running, gen.pages_used) == (1, 3)
    gen.cancel("x")
    assert (gen.running, gen.pages_used) == (0, 0)
    gen.cancel("x")
    gen.cancel("never heard of it")
    assert gen.step() == []


def test_end_of_sequence_stops_unless_ignored_or_too_early() -> None:
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    free = alone(base, request("x", prompt(5), GREEDY)).tokens
    stop = free[3]
    first = free.index(stop)
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=(stop,))

    def run(**settings: object) -> Answer:
        return alone(base, request("x", prompt(5), SamplingParams(max_tokens=16, temperature=0.0, **settings)))

    assert run() == Answer(free[: first + 1], finished=FinishReason.STOP)
    assert run(ignore_eos=True) == Answer(free, finished=FinishReason.LENGTH)
    late = run(min_tokens=10)
    assert late.tokens[:first] == free[:first]
    assert stop not in late.tokens[:10]
    assert len(late.tokens) >= 10
    other = free[1]
    assert run(ignore_eos=True, stop_token_ids=(other,)) == Answer(
        free[: free.index(other) + 1], finished=FinishReason.STOP
    )


def test_max_tokens_is_cut_to_the_context() -> None:
    base = base_of("llama")
    result = alone(base, request("x", prompt(CONTEXT - 3), SamplingParams(max_tokens=50, seed=1)))
    assert (len(result.tokens), result.finished) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request("x", (), GREEDY), EmptyPrompt, "at least one"),
        (request("x", prompt(CONTEXT), GREEDY), PromptTooLong, f"context of {CONTEXT} tokens, got {CONTEXT}"),
        (request("x", prompt(40), SamplingParams(max_tokens=26)), PromptTooLong, "pool of 64 tokens, got 40 and 26"),
        (request("x", (1, VOCAB), GREEDY), InvalidRequest, f"from 0 to {VOCAB - 1}, got {VOCAB}"),
        (request("x", (1, -1), GREEDY), InvalidRequest, "got -1"),
        (request("x", (1,), SamplingParams(logit_bias={VOCAB: 1.0})), InvalidRequest, "token ids"),
        (request("x", (1,), SamplingParams(stop_token_ids=(999,))), InvalidRequest, "token ids"),
        (request("x", (1,), SamplingParams(max_tokens=0)), InvalidRequest, "max_tokens"),
        (request("good", (1,), GREEDY), InvalidRequest, "new request id"),
        (request("x", (1,), GREEDY, AdapterRef("nobody", 1)), AdapterNotFound, "nobody@1"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_go_on(bad: Generate, error: type[Exception], words: str) -> None:
    base = base_of("llama")
    gen = make_generator(base, tokens=64)
    good = request("good", prompt(5), GREEDY)
    gen.add(good)
    gen.step()
    with pytest.raises(error, match=words):
        gen.add(bad)
    assert gen.running == 1
    rest = answers(gen)["good"].tokens
    assert rest == alone(base, good).tokens[1:]


@pytest.mark.parametrize("lora_backend", by_day([REFERENCE, NAIVE, GROUPED], GROUPED))
def test_logits_that_are_not_finite_fail_their_own_request_only(lora_backend: LoraBackend) -> None:
    """The weights are finite, as an import checks; what they add to the layers is not."""
    base = base_of("llama")
    broken, fine = AdapterRef("broken", 1), AdapterRef("fine", 1)
    weights = adapter(base, 1, 2)
    poisoned = {name: LoraPair(pair.a_RD, pair.b_OR * 3e38, 1.0) for name, pair in weights.sites.items()}
    shelf = Shelf({broken: LoraWeights(weights.settings, poisoned), fine: weights})
    good = [request("base", prompt(30), GREEDY), request("fine", prompt(12), GREEDY, fine)]
    gen = make_generator(base, shelf, tokens=96, lora_backend=lora_backend)
    results = answers(gen, [request("bad", prompt(30), GREEDY, broken), *good])
    assert results["bad"].failed == "non_finite_logits"
    healthy = Shelf({fine: weights})
    assert {one.id: results[one.id] for one in good} == answers(
        make_generator(base, healthy, tokens=96, lora_backend=lora_backend), good
    )
    assert not +shelf.held
    again = answers(gen, good)  # on the pages that the broken one left
    assert again == {one.id: results[one.id] for one in good}


@pytest.mark.parametrize("ref", [None, AdapterRef("loud", 3)])
def test_the_error_names_whose_logits_are_not_finite_and_nobody_finds_the_pages(
    ref: AdapterRef | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of("llama")
    gen = make_generator(base, Shelf({} if ref is None else {ref: adapter(base, 1, 2)}), step_tokens=32)
    forward = Base.forward

    def spoiled(self: Base, tokens_T: Tensor, *args: object, **options: object) -> Tensor:
        return forward(self, tokens_T, *args, **options) * torch.nan

    with monkeypatch.context() as patch:
        patch.setattr(Base, "forward", spoiled)
        gen.add(request("bad", prompt(70), GREEDY, ref))
        messages = [message for _ in range(3) for message in gen.step()]
    [failed] = messages
    assert isinstance(failed, RequestFailed)
    assert failed.code == "non_finite_logits"
    assert ("loud@3" if ref else "the base") in failed.message
    assert gen.pages_used == 0
    answers(gen, [request("again", prompt(70), GREEDY, ref)])
    assert gen.scheduler.active.prefix_hits == 0
    answers(gen, [request("good pages stay", prompt(70), GREEDY, ref)])
    assert gen.scheduler.active.prefix_hits > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", in_turns(FAMILIES, ("llama",)))
def test_logprobs_are_the_models(family: str, dtype: torch.dtype) -> None:
    """In fp32 to 1e-3. In bf16 the model's own logits are coarser than that: ours are no farther from its fp32 ones."""
    model = tiny_model(family).to(dtype).eval()
    model.set_attn_implementation("eager")
    exact = tiny_model(family).eval()
    exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    exact.set_attn_implementation("eager")
    base = wrap_base(tiny_model(family).to(dtype), name=family, eos_token_ids=())
    ours, theirs = [], []
    for length in LENGTHS:
        asked = prompt(length)
        result = alone(base, request("x", asked, SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)))
        text, at = torch.tensor([[*asked, *result.tokens]]), torch.tensor(result.tokens)[:, None]
        with torch.no_grad():
            wanted, own = (of(text).logits[0, length - 1 : -1].float().log_softmax(-1) for of in (exact, model))
        told = torch.tensor([one.logprob for one in result.logprobs])
        ours.append((told - wanted.gather(1, at)[:, 0]).abs())
        theirs.append((own - wanted).gather(1, at)[:, 0].abs())
    if dtype is torch.float32:
        assert torch.cat(ours).max() < 1e-3
    else:
        assert torch.cat(ours).mean() <= 1.5 * torch.cat(theirs).mean()


def test_tokens_are_the_seeds() -> None:
    base = base_of("llama")
    runs = [alone(base, request("x", prompt(5), SamplingParams(max_tokens=12, seed=s))).tokens for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_version_that_a_request_began_with_stays() -> None:
    base, ref = base_of("llama"), AdapterRef("a", 1)
    shelf = Shelf({ref: adapter(base, 1, 4)})
    one = request("x", prompt(5), GREEDY, ref)
    expected = alone(base, one, shelf).tokens
    gen = make_generator(base, shelf)
    gen.add(one)
    [first] = gen.step()
    shelf.weights[ref] = adapter(base, 9, 4)
    assert isinstance(first, Tokens)
    assert [*first.tokens, *answers(gen)["x"].tokens] == expected
