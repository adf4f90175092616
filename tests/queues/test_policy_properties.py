"""Properties of policies for every view: the queue is respected, no idling while there is work, no
starvation."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from coserve.queues.policies.inference_first import InferenceFirst
from coserve.queues.policies.overlap import Overlap
from coserve.queues.policies.paper import Ets, TemporalSharing, Unit
from coserve.queues.policies.slack import MAX_SLICE, MOST_MARGIN, Slack, latest_start
from coserve.queues.policies.spatial import MAX_SLICES, Spatial
from coserve.queues.policy import Alternation, Costs, Due, InFlight, Policy, Serve, Train, View, Wait

times = st.integers(0, 4000).map(lambda n: n / 64)  # dyadic: sums and differences are exact, as the paper's are
costs = st.floats(0, 2, allow_nan=False)
credits = st.sampled_from((0.0, -1.0, 0.5))  # of tokens in time, late and early: fractions of the window
dues = st.tuples(times, st.integers(1, 2), st.integers(0, 3), times, credits, st.booleans())


class Request(NamedTuple):
    """A waiting one."""

    arrived: float
    deadline: float
    pending: int
    end: float
    decodes: int


alternations = st.builds(Alternation, st.sampled_from([None, "j0", "j1", "j2"]), st.integers(0, 6), st.integers(0, 6))
units: st.SearchStrategy[Unit] = st.sampled_from(("request", "batch"))


@st.composite
def step_costs(draw: st.DrawFn) -> Costs:
    """A step that admits nobody takes at most as long."""
    serve, micro_step, decode, overlapped = (draw(costs) for _ in range(4))
    found = Costs(
        serve,
        micro_step,
        decode=decode,
        overlapped=overlapped,
        micro_step_expected=draw(st.floats(0, micro_step) | st.just(math.inf)),
        overlapped_expected=draw(st.floats(0, overlapped)),
        serve_expected=draw(st.floats(0, serve) | st.just(math.inf)),
        train_overlap_speed=draw(st.floats(0, 1)),
    )
    less = draw(st.none() | st.floats(0, 1))
    if less is None:
        return found
    nobody = replace(
        found,
        serve=less * serve,
        serve_expected=found.serve_expected if less == 0 else less * found.serve_expected,
        overlapped=less * overlapped,
        overlapped_expected=less * found.overlapped_expected,
    )
    return replace(found, admitting_nobody=nobody)


@st.composite
def views(draw: st.DrawFn, max_running: int = 8) -> View:
    running = tuple(
        Due(t, steps, decodes, window, credit * window, first)
        for t, steps, decodes, window, credit, first in draw(st.lists(dues, max_size=max_running))
    )
    arrivals = draw(st.lists(times, max_size=12))  # in whatever order they will be admitted
    headroom = draw(st.integers(0, max_running - len(running)))
    jobs = tuple(f"j{i}" for i in range(draw(st.integers(0, 3))))
    waiting = [
        Request(
            t, t + draw(times), draw(st.integers(1, 9)), t + draw(times | st.just(math.inf)), draw(st.integers(0, 9))
        )
        for t in arrivals
    ]
    return View(
        waiting=tuple(waiting[:headroom]),
        queued=len(arrivals),
        first_arrival=min(arrivals, default=None),
        running=running,
        step_tokens=draw(st.integers(1, 4)),
        jobs=jobs,
        alternation=draw(alternations),
        train_waiting_since=draw(times) if jobs else None,
        costs=draw(step_costs()),
        in_flight=draw(st.builds(InFlight, st.integers(0, MAX_SLICES), st.booleans(), times)),
    )


policies: st.SearchStrategy[Policy] = st.one_of(
    st.builds(Ets, st.integers(1, 9), times),
    st.builds(TemporalSharing, st.integers(1, 4), st.integers(1, 9), times, units),
    st.just(InferenceFirst()),
    st.builds(Slack, times, weight=st.floats(0, 1)),
    st.just(Spatial()),
    st.builds(Overlap, times, weight=st.floats(0, 1), overlapped=st.booleans()),
)


def prepared_on_a_thread(view: View) -> bool:
    """The job that has the turn cannot compute anything yet."""
    return view.alternation.job is not None and view.alternation.job not in view.jobs


@given(policies, views(), times)
def test_every_decision_can_be_carried_out(policy: Policy, view: View, now: float) -> None:
    match policy.decide(view, now):
        case Serve(admit):
            assert 0 <= admit <= len(view.waiting)
            assert admit or view.running, "a step of nobody"
        case Train(job, micro_steps):
            assert job in view.jobs and job in (view.jobs[0], view.alternation.job)
            assert micro_steps is None or micro_steps >= 1
        case Wait(until):
            paced = isinstance(policy, Overlap) and view.in_flight.slices and until is not None
            assert not view.running or paced, "something was runnable"
            assert not view.jobs or prepared_on_a_thread(view) or view.in_flight.slices == MAX_SLICES or paced
            assert until is None or until > now


@given(policies, views(), times)
def test_no_decision_leads_back_to_itself(policy: Policy, view: View, now: float) -> None:
    """A step admits or computes, a slice trains, and whoever waits for a time does something else when it has come:
    nothing is decided again before something has changed."""
    match policy.decide(view, now):
        case Wait(until) if until is not None:
            assert not isinstance(policy.decide(view, until), Wait)
        case Wait() if not prepared_on_a_thread(view):
            assert not view.waiting, "somebody could be admitted"
        case Serve(0):
            assert view.running, "nobody can compute anything"
        case _:
            pass


@given(policies, views(), times)
def test_same_view_same_decision(policy: Policy, view: View, now: float) -> None:
    before = copy.deepcopy(view)
    first = policy.decide(view, now)
    policy.decide(View((), 0, None, (), 1, ("other",), Alternation("x", 3, 3), 0.0, Costs(1, 1)), now + 7)
    assert policy.decide(before, now) == first
    assert view == before


@given(st.integers(1, 9), times, views(), times)
def test_ets_is_algorithm_1(batch_size: int, delay: float, view: View, now: float) -> None:
    decision = Ets(batch_size, delay).decide(view, now)
    if view.running:  # "perform the inference request (synchronously)"
        assert decision == Serve(0)
    elif (
        view.waiting
        and view.first_arrival is not None  # and the batch before does not wait for its adapters
        and (view.queued >= batch_size or now - view.first_arrival > delay)
    ):
        assert decision == Serve(min(batch_size, len(view.waiting)))
    elif view.jobs:
        assert decision == Train(view.jobs[0], None)
    else:
        assert isinstance(decision, Wait)


@given(st.integers(1, 4), st.integers(1, 9), times, units, views(), times)
def test_ts_never_dispatches_more_than_n_batches_in_a_row_beside_a_job(
    n: int, size: int, delay: float, unit: Unit, view: View, now: float
) -> None:
    decision = TemporalSharing(n, size, delay, unit).decide(view, now)
    if isinstance(decision, Serve) and not view.running and view.jobs:
        assert (
            view.alternation.batches_since_job if unit == "request" else view.alternation.batches_since_micro_batch
        ) < n


@given(st.integers(1, 4), st.integers(1, 9), times, views(), times)
def test_ts_interrupts_no_fine_tuning_request(n: int, size: int, delay: float, view: View, now: float) -> None:
    decision = TemporalSharing(n, size, delay).decide(view, now)
    if view.alternation.job is not None and not view.running:
        assert decision in (Train(view.alternation.job, None), Wait(None))


@given(times, views(), times)
def test_slack_lets_no_job_wait_beyond_its_patience(patience: float, view: View, now: float) -> None:
    decision = Slack(patience).decide(view, now)
    since = view.train_waiting_since
    if since is not None and now - since >= patience and not view.in_flight.since_step:
        assert isinstance(decision, Train)


def planned(due: Due, most: float, mean: float) -> float:
    """Seconds of the steps to its next token."""
    return min(due.steps * most, due.steps * mean + MOST_MARGIN * due.window)


@given(times, views(), times)
def test_overlap_launches_nothing_that_breaks_a_promise(patience: float, view: View, now: float) -> None:
    """While requests run, the launch of a slice ends before a step must begin, by the time that it takes beside
    training; or it is computed before, by the time that a step takes alone."""
    decision = Overlap(patience).decide(view, now)
    if isinstance(decision, Train) and decision.overdue is None and (view.running or view.waiting):
        assert decision.micro_steps is not None
        seconds = decision.micro_steps * view.costs.micro_step
        step = view.costs.admitting_nobody or view.costs
        for due in view.running:
            alone = max(now, view.in_flight.until) + seconds + planned(due, step.serve, step.serve_expected)
            overlapped = now + seconds + planned(due, step.overlapped, step.overlapped_expected)
            assert min(alone, overlapped) <= due.deadline + 1e-9


TINY_MICRO_STEP = View((), 0, None, (), 1, ("j",), Alternation(), 0.0, Costs(0.0, 5e-324))


@example(TINY_MICRO_STEP, 0.0)
@given(views(), times)
def test_slack_breaks_no_promise_that_it_can_keep(view: View, now: float) -> None:
    """While requests run, a slice of a job that still has patience ends early enough for every deadline."""
    decision = Slack(patience=1e9).decide(view, now)
    if isinstance(decision, Train) and (view.running or view.waiting):
        assert decision.micro_steps is not None
        end = now + decision.micro_steps * view.costs.micro_step
        tokens = accumulate(each.pending for each in view.waiting)
        steps = [math.ceil(each / view.step_tokens) for each in tokens]
        dues = [Due(each.deadline, count) for each, count in zip(view.waiting, steps, strict=True)]
        dues += [Due(each.end, count, each.decodes) for each, count in zip(view.waiting, steps, strict=True)]
        costs = view.costs
        for due in dues:
            assert end + due.steps * costs.serve + due.decodes * costs.decode <= due.deadline + 1e-9
        for due in view.running:
            steps_end = end + planned(due, costs.serve, costs.serve_expected)
            assert steps_end + due.decodes * costs.decode <= due.deadline + 1e-9


@given(views().filter(lambda view: bool(view.running or view.waiting)), st.floats(0, 1), st.floats(0, 1) | st.just(1.0))
def test_less_weight_of_training_lets_no_step_begin_later(view: View, one: float, other: float) -> None:
    """Nor if the last token came late: the next ones make up for it."""
    less, more = sorted((one, other))
    costs = view.costs
    begin = latest_start(view, costs.serve, costs.serve_expected, less)
    assert begin <= latest_start(view, costs.serve, costs.serve_expected, more) + 1e-9


@given(times, views(), times)
def test_slack_admits_all_that_fit(patience: float, view: View, now: float) -> None:
    decision = Slack(patience).decide(view, now)
    if isinstance(decision, Serve):
        assert decision.admit == len(view.waiting)


@given(views(), times)
def test_spatial_sharing_lets_neither_side_wait_for_the_other(view: View, now: float) -> None:
    """Each side runs whenever it can: a step waits for one launch at most, and a slice for one step at most."""
    decision = Spatial().decide(view, now)
    serves, flight = bool(view.running or view.waiting), view.in_flight
    match decision:
        case Train(job, micro_steps):
            assert flight.slices < MAX_SLICES and not (serves and flight.since_step), "generation waits"
            assert job == view.jobs[0] and micro_steps is not None
            assert micro_steps == 1 or micro_steps * view.costs.micro_step <= MAX_SLICE + 1e-9
        case Serve(admit):
            assert admit == len(view.waiting)
            assert not view.jobs or flight.slices == MAX_SLICES or flight.since_step, "training waits"
        case Wait(until):
            assert until is None and not serves and (not view.jobs or flight.slices == MAX_SLICES)
