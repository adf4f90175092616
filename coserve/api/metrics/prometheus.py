"""Prometheus metrics, in a separate `CollectorRegistry`. Samples never grow with users: adapters, jobs and paths are
not labels, but for the one sample of `vllm:lora_requests_info`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import add

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coserve.api.metrics.vllm_names import VllmNames
from coserve.core.gpu_memory import USES, MemoryUse
from coserve.core.health import RankInfo
from coserve.core.link.engine import EngineWarming
from coserve.core.link.stats import STALL_BUCKETS, EngineStats
from coserve.core.training.jobs import JobState
from coserve.core.types import FinishReason

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

_TOTALS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("preemptions", "Sequences sent back to the queue", lambda s: s.preemptions),
    (
        "step_adapters",
        "Adapters in generation steps, each counted in every step; divided by generation_steps, adapters per step",
        lambda s: s.step_adapters,
    ),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    ("serve_seconds", "Time in generation steps", lambda s: s.serve_seconds),
    ("train_seconds", "Time in fine-tuning slices", lambda s: s.train_seconds),
    (
        "engine_cuda_alloc",
        "Calls of cudaMalloc: none is expected once the engine is warm",
        lambda s: s.allocator.allocs,
    ),
    ("engine_cuda_free", "Calls of cudaFree, which wait for the GPU", lambda s: s.allocator.frees),
    (
        "engine_cuda_alloc_retries",
        "Allocations for which cached memory was freed first: the memory plan was too small",
        lambda s: s.allocator.retries,
    ),
    ("engine_pinned_alloc", "Calls of cudaHostAlloc, for pinned host memory", lambda s: s.allocator.pinned),
    (
        "train_batches",
        "Forwards and backwards of fine-tuning rows, of one job or of several together",
        lambda s: s.batches.count,
    ),
    (
        "train_batch_rows",
        "Rows in fine-tuning batches; divided by train_batches, rows per batch",
        lambda s: s.batches.rows,
    ),
    (
        "train_batch_jobs",
        "Jobs in fine-tuning batches, each counted in every batch it shared; divided by train_batches, jobs per batch",
        lambda s: s.batches.jobs,
    ),
    (
        "train_patience_slices",
        "Fine-tuning slices that ran only because of train_patience or train_floor",
        lambda s: s.patience_slices,
    ),
)
"""Counters that an engine starts at zero."""


class Metrics:
    """Metrics that the handlers count, and (through `EngineGauges`) metrics that the engine reports."""

    def __init__(self, model: Callable[[], str]) -> None:
        """`model` returns the base's name, a label of the metrics under vLLM's names."""
        self.registry = CollectorRegistry(auto_describe=True)
        self._vllm = CollectorRegistry()
        self._vllm.register(VllmNames(self.registry, model))
        self.engine = EngineGauges()
        self.registry.register(self.engine)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token")
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens of a sequence")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token")
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to admission")
        self._prefill = self._histogram("request_prefill_time_seconds", "Admission to first token")
        self._decode = self._histogram("request_decode_time_seconds", "First token to last")
        self._inference = self._histogram("request_inference_time_seconds", "Admission to last token")
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of an admitted request", _TOKENS)
        self._output_size = self._histogram("request_generation_tokens", "Generated tokens of a sequence", _TOKENS)
        self._prompt = self._counter(
            "prompt_tokens",
            "Prompt tokens of requests that were admitted: one that gives up while it waits does not count",
        )
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._finished = self._counter("requests", "Sequences that ended, by finish_reason", "finish_reason")
        for reason in FinishReason:
            self._finished.labels(reason.value)
        self.refused = self._counter("requests_refused", "Requests refused because the queue was full")
        self.shed = self._counter(
            "requests_shed", "Requests refused because their first token would have come too late"
        )
        self._responses = self._counter("http_answers", "HTTP responses, by route and status", "route", "status")
        self._trained = self._counter("train_tokens", "Tokens read by optimizer steps")
        self._steps = self._counter("train_steps", "Optimizer steps")
        self._ended_jobs = self._counter("jobs_ended", "Jobs that ended, by state", "state")
        for state in JobState:
            if state.terminal:
                self._ended_jobs.labels(state.value)
        self._jobs = self._gauge("jobs", "Unfinished jobs, by state", "state")
        self._starts = self._gauge("engine_restarts", "Times that the engine was started again")
        self._ready = self._gauge("ready", "1: /health/ready answers 200")
        self._warmup_done = self._gauge(
            "warmup_done", "Units of an engine's start that are done: compilations, loads, captures"
        )
        self._warmup_total = self._gauge("warmup_total", "Units of an engine's start")
        self._rank_ready = self._gauge(
            "rank_ready",
            "By rank, with --tp above 1: 1 while its process follows, 0 while it starts or is lost",
            "rank",
        )
        self._rank_behind = self._gauge(
            "rank_behind", "By rank: commands that rank 0 has finished and the rank has not", "rank"
        )
        self._adapters = Gauge(
            "vllm:lora_requests_info",
            "One sample, whose value is the time of the answer. Its labels list the names of adapters of requests that "
            "run (running_lora_adapters) and that wait in the engine (waiting_lora_adapters), separated by commas; "
            "max_lora: most that may run at once, max_running",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY) -> Histogram:
        return Histogram(f"coserve_{name}", text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"coserve_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"coserve_{name}", text, labels, registry=self.registry)

    # ---- requests

    def admitted(self, seconds: float, prompt: int) -> None:
        """Count a request that joined the batch `seconds` after it arrived. `prompt`: number of its tokens."""
        self._queue.observe(seconds)
        self._prompt.inc(prompt)
        self._prompt_size.observe(prompt)

    def tokens(self, count: int, arrived: float, last: float | None, now: float) -> None:
        """Count `count` tokens of one sequence that came at `now`; the previous ones, if any, came at `last`."""
        self._generated.inc(count)
        if last is None:
            self._ttft.observe(now - arrived)
        for _ in range(count if last is not None else 0):
            self._itl.observe((now - (last or now)) / count)

    def finished(self, reason: FinishReason, tokens: int, seconds: float) -> None:
        self._finished.labels(reason.value).inc()
        self._output_size.observe(tokens)
        self._e2e.observe(seconds)

    def phases(self, admitted: float | None, first: float | None, now: float) -> None:
        """Observe the phases of a sequence that ended at `now`. `admitted`: when its request was admitted; `first`:
        when it produced its first token."""
        if admitted is not None:
            self._inference.observe(now - admitted)
            if first is not None:
                self._prefill.observe(first - admitted)
        if first is not None:
            self._decode.observe(now - first)

    def cancelled(self) -> None:
        self._finished.labels(FinishReason.CANCELLED.value).inc()

    def responded(self, route: str, status: int) -> None:
        """Count a response. `route` is the route's name, never the path."""
        self._responses.labels(route, str(status)).inc()

    def adapters(self, running: Iterable[str], waiting: Iterable[str], most: int) -> None:
        """Replace the sample of adapters in requests. `running`, `waiting`: names; `most`: that may run at once."""
        self._adapters.clear()
        self._adapters.labels(most, *(",".join(sorted(names)) for names in (running, waiting))).set_to_current_time()

    # ---- jobs

    def step(self, tokens: int) -> None:
        self._steps.inc()
        self._trained.inc(tokens)

    def job_ended(self, state: JobState) -> None:
        self._ended_jobs.labels(state.value).inc()

    def jobs(self, states: Iterable[JobState]) -> None:
        """Set the gauges of jobs. `states`: the states of all unfinished jobs now."""
        counts = dict.fromkeys((state for state in JobState if not state.terminal), 0)
        for state in states:
            counts[state] += 1
        for state, count in counts.items():
            self._jobs.labels(state.value).set(count)

    # ---- the daemon

    def status(self, ready: bool, warmup: EngineWarming | None) -> None:
        """Set the start-up gauges. `warmup` None: there is no engine, or it has not reported yet."""
        self._ready.set(ready)
        self._warmup_done.set(0 if warmup is None else warmup.done)
        self._warmup_total.set(0 if warmup is None else warmup.total)

    def ranks(self, ranks: Iterable[RankInfo]) -> None:
        """Set the gauges of the engine's processes; empty if the engine is one process."""
        for own in ranks:
            self._rank_ready.labels(own.rank).set(own.state == "ready")
            self._rank_behind.labels(own.rank).set(own.behind)

    # ---- the page

    def page(self, restarts: int) -> bytes:
        """Return the metrics in Prometheus's text format."""
        self._starts.set(restarts)
        return generate_latest(self.registry) + generate_latest(self._vllm)


def gpu_memory(use: MemoryUse | None) -> Iterable[Metric]:
    """Yield the metrics of GPU memory by use; without samples if no memory is planned."""
    uses = GaugeMetricFamily(
        "coserve_gpu_memory_bytes",
        "By use, whose sum is the device: weights, pages, graphs, jobs (what they keep between "
        "micro-batches), temporary, cached (by torch), context (CUDA's, and what other processes had "
        "when the engine started), others (what other processes took since), free. Only where memory "
        "is planned",
        labels=["use"],
    )
    for name in USES if use is not None else ():
        uses.add_metric([name], getattr(use, name))
    yield uses
    limit = "GPU memory there is for jobs now; less than was planned while other processes take it"
    yield GaugeMetricFamily("coserve_jobs_memory_limit_bytes", limit, value=None if use is None else use.training)
    needed = "GPU memory that the jobs that have started are predicted to need"
    yield GaugeMetricFamily("coserve_jobs_memory_needed_bytes", needed, value=None if use is None else use.needed)


_LOADS = (
    "Loads of adapters that spent time on a cause: queue (for a reader), read (a packed file), hash and pack (PEFT's "
    "files), write (a packed file, beside all else), pages (a request waits for them), defragment (pages move for a "
    "run of them), copy (its launch)"
)
_STEPS = (
    "Generation steps, by kind (prefill: with prompts, or decode) and by beside_training: true if the device computed "
    "training at the same time, else false"
)
_STEP_SECONDS = (
    "Seconds of generation steps, from when the device could begin each; includes its launch if the device waited for "
    "it"
)


Counts = dict[tuple[str, ...], tuple[float, ...]]
"""Numbers that only grow, by their metric and the values of its labels."""


def counts_of(stats: EngineStats) -> Counts:
    totals: Counts = {(name,): (value(stats),) for name, _, value in _TOTALS}
    stalls: Counts = {("engine_stall", each.cause): (each.seconds, *each.buckets) for each in stats.stalls}
    steps: Counts = {
        ("generation_step", each.kind, str(each.overlapped).lower()): (each.count, each.seconds) for each in stats.steps
    }
    loads: Counts = {("adapter_load", each.cause): (each.count, each.seconds) for each in stats.loads}
    return totals | stalls | steps | loads


def counted(what: str, text: str, of_seconds: str, counts: Counts, *labels: str) -> Iterable[Metric]:
    """Return two counters of `what`, by the values of their labels: how many, and their seconds."""
    number = CounterMetricFamily(f"coserve_{what}s", text, labels=labels)
    seconds = CounterMetricFamily(f"coserve_{what}_seconds", of_seconds, labels=labels)
    for (name, *values), each in counts.items():
        if name == what:
            number.add_metric(values, each[0])
            seconds.add_metric(values, each[1])
    return number, seconds


class EngineGauges(Collector):
    """Metrics of the engine's last report. Counters never fall back to zero: counts of ended engines are added as an
    offset."""

    def __init__(self) -> None:
        self._stats: EngineStats | None = None
        self._before: Counts = {}

    def report(self, stats: EngineStats | None) -> None:
        """Store a report; None: the engine ended."""
        if stats is None:
            self._before = self._counts()
        self._stats = stats

    def _counts(self) -> Counts:
        now = {} if self._stats is None else counts_of(self._stats)
        sums = {key: tuple(map(add, self._before.get(key, (0.0,) * len(each)), each)) for key, each in now.items()}
        return self._before | sums

    def collect(self) -> Iterable[Metric]:
        s = self._stats
        used = s.pages_used / s.pages_total if s is not None and s.pages_total else 0.0
        gauges = (
            ("engine_up", "1: the engine runs", float(s is not None)),
            ("num_requests_waiting", "Sequences in the queue", s.waiting if s else 0),
            ("num_requests_running", "Sequences that run", s.running if s else 0),
            ("num_jobs_in_engine", "Jobs that train or wait for their turn", s.jobs if s else 0),
            ("kv_cache_usage_ratio", "Pages in use, by KV and adapters, 0 to 1", used),
            ("kv_cache_pages", "Pages in the pool", s.pages_total if s else 0),
            ("adapter_pages", "Pages that hold adapters, in use or not", s.pages_adapters if s else 0),
            (
                "cuda_graphs_missing",
                "CUDA graphs still to be captured, when idle and between steps; their steps are slower until then",
                s.graphs_missing if s else 0,
            ),
            ("memory_planned_bytes", "GPU memory planned for torch", s.memory.planned if s and s.memory else 0),
            ("memory_peak_bytes", "Peak GPU memory allocated by torch", s.allocator.peak if s else 0),
            (
                "engine_backlog_bytes",
                "Messages of the engine that the API process has not read; more than 8 MiB is logged",
                s.backlog if s else 0,
            ),
            ("adapters_resident", "Adapters in memory", len(s.resident) if s else 0),
            ("host_adapter_bytes", "Host memory that adapters take", s.host_adapter_bytes if s else 0),
            (
                "train_speed_beside_ratio",
                (
                    "With overlap: training's speed beside a step of decodes, as a share of its speed alone; 1 until "
                    "measured"
                ),
                s.train_overlap_speed if s else 1.0,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"coserve_{name}", text, value=value)
        yield from gpu_memory(s.memory if s else None)
        counts = self._counts()
        for name, text, _ in _TOTALS:
            yield CounterMetricFamily(f"coserve_{name}", text, value=counts.get((name,), (0.0,))[0])
        yield from counted("generation_step", _STEPS, _STEP_SECONDS, counts, "kind", "beside_training")
        yield from counted("adapter_load", _LOADS, "Seconds that adapter loads spent, by cause", counts, "cause")
        stalls = HistogramMetricFamily(
            "coserve_engine_stall_seconds",
            "Time between two moments at which a generation step can begin, while requests waited or ran, by cause",
            labels=["cause"],
        )
        bounds = (*map(str, STALL_BUCKETS), "+Inf")
        for (name, *cause), (seconds, *buckets) in counts.items():
            if name == "engine_stall":
                stalls.add_metric(cause, list(zip(bounds, accumulate(buckets), strict=True)), seconds)
        yield stalls
