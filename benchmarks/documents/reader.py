"""Train a base until it reads: it answers from a document in its prompt, and asks about one.

    python -m benchmarks.documents.reader --save build/reader        (one GPU; about 450 s)
    python -m benchmarks.documents.reader --tiny --steps 3 --save /tmp/reader --out /tmp/tried          (a CPU)

SmolLM2-135M-Instruct hardly reads, and then `documents.recovered` compares two small numbers. All its weights are
trained here on drawn documents (`reading.py`), new ones in each step, whose facts, wordings, names and values no
document of the benchmark has (`relations.txt`; two in five of the wordings are new in each document): questions about
what the document says, the other way round, two at once, and about what it does not say; and prompts that ask for
questions, as a job of a document has them. Before that it repeats random tokens: where it cannot, it does not read.

Without a document nothing is taught. There the base stays what it was: questions alone, general prompts and prompts of
its own are in each step, with its own first answers and the divergence from its first distribution as their loss.

`documents.reader.in_context`: right answers to `template` questions about documents of the benchmark's own kind, which
are in no seed of it. With `--known-wordings` three in ten documents have the benchmark's relations, with new names:
then it is `documents.reader.known_wordings.in_context`, which says how well what is read is found, but not whether
other words are understood. Questions of these wordings are not asked for, so that jobs still ask their own. Then

    python -m benchmarks.documents.learned --model build/reader --label reader --out R
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, Target, summarize
from benchmarks.documents.arms import ANSWER_TOKENS, in_prompt, right
from benchmarks.documents.facts import Document, Kind, documents
from benchmarks.documents.reading import ABSENT, Batches, Reading, Rows
from benchmarks.documents.relations import Relation, of_benchmark
from coserve.data.pretrained.source import locate
from coserve.workloads.bundled import bundled_prompts

FILE = "documents_reader.json"
AIM, RATE, WARMUP, LAST = 0.9, 3e-4, 30, 0.05
"""Share to reach; AdamW's peak rate; steps of warm-up; the rate in the end, as a share of the peak."""
ROWS, TOKENS = 8, 3072
"""Of a step."""
KEPT, KEPT_AT_ONCE, KEPT_TOKENS = 768, 16, 64
"""Texts that the base wrote, those of a step, and the most tokens that it wrote of each."""
WRITTEN_AT_ONCE = 1 << 18
"""Tokens of prompts."""
SEEDS = 1 << 20
"""First seed of the documents here; those of the benchmark are small."""


class Reader:
    """The base in training, with its tokenizer, and the base as it was."""

    def __init__(self, source: str, given: Sequence[Relation] = ()) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = Path(locate(source))
        gguf = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if gguf else path
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, **gguf)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf)
        ends = self.model.config.eos_token_id
        self.end = int(ends if isinstance(ends, int) else ends[0])
        self.tokenizer.eos_token = self.tokenizer.convert_ids_to_tokens(self.end)  # GGUF's is another one
        self.first: Any = type(self.model)(self.model.config).to(torch.bfloat16 if self.cuda else torch.float32)
        self.first.load_state_dict(self.model.state_dict())
        self.model.to(self.device)
        self.first.to(self.device).eval()
        self.reading = Reading(self.tokenizer, self.end, given)

    def _hidden(self, model: Any, ids: Tensor, **more: Tensor) -> Tensor:  # noqa: ANN401 - transformers
        with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
            found: Tensor = model.model(input_ids=ids, use_cache=False, **more).last_hidden_state
        return found.flatten(0, 1)

    def _logits(self, model: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401 - transformers
        with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
            found: Tensor = model.lm_head(hidden)
        return found.float()

    def loss(self, rows: Rows) -> Tensor:
        """Mean negative log-likelihood of the rows' answers, nats a token."""
        on = self.device
        moved = Rows(rows.ids.to(on), rows.positions.to(on), rows.tree.to(on), rows.branch.to(on))
        hidden = self._hidden(self.model, moved.ids, position_ids=moved.positions, attention_mask=moved.mask())
        logits = self._logits(self.model, hidden[torch.tensor(rows.at, device=on)])
        return functional.cross_entropy(logits, torch.tensor(rows.labels, device=on))

    def divergence(self, kept: Sequence[tuple[list[int], list[int]]]) -> Tensor:
        """Mean KL divergence of the base from what it was, nats a token of its own answers."""
        longest, at = max(len(prompt) for prompt, _ in kept) + KEPT_TOKENS, list[int]()
        ids = torch.full((len(kept), longest), self.end)
        for row, (prompt, answer) in enumerate(kept):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            begin = row * longest + len(prompt) - 1
            at += range(begin, begin + len(answer))
        ids, where = ids.to(self.device), torch.tensor(at, device=self.device)
        with torch.no_grad():
            before = self._logits(self.first, self._hidden(self.first, ids)[where]).log_softmax(-1)
        after = self._logits(self.model, self._hidden(self.model, ids)[where]).log_softmax(-1)
        return functional.kl_div(after, before, reduction="batchmean", log_target=True)

    @torch.no_grad()
    def written(self, model: Any, prompts: Sequence[list[int]], most: int, *, sample: bool) -> list[list[int]]:  # noqa: ANN401
        """What the model writes after each prompt, the end of the turn included."""
        found = list[list[int]]()
        at_once = min(512, 1 + WRITTEN_AT_ONCE // max(map(len, prompts)))
        for first in range(0, len(prompts), at_once):
            some = prompts[first : first + at_once]
            longest = max(map(len, some))
            ids = torch.tensor([[self.end] * (longest - len(each)) + each for each in some], device=self.device)
            mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in some], device=self.device)
            drawn = (
                {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0} if sample else {"do_sample": False}
            )
            with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
                made = model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=most,
                    eos_token_id=self.end,
                    pad_token_id=self.end,
                    **drawn,
                )
            for each in made[:, longest:].tolist():
                found.append(each[: each.index(self.end) + 1] if self.end in each else each)
        return found

    def kept(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Prompts without a document, and what the base answered: questions of the taught kind, general ones, and a
        half that it has asked itself."""
        head = self.reading.encode(self.reading.chat({"role": "user", "content": "@"}).split("@")[0])
        own = self.written(self.first, [head] * (count // 2), 48, sample=True)
        texts = [self.tokenizer.decode(each, skip_special_tokens=True).strip() for each in own if self.end in each]
        texts += bundled_prompts()
        prompts = [self.reading.ask(text) for text in texts if text]
        prompts += self.reading.bare(SEEDS - 1, count - len(prompts))
        answers = self.written(self.first, prompts, KEPT_TOKENS, sample=True)
        return [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer]

    def share(self, kind: Kind, asked: Sequence[Document], *, read: bool = True) -> tuple[float, float]:
        """Shares of right greedy answers, and of answers that say that the text does not say it. `read`: with the
        document in the prompt."""
        questions = [(each, one) for one in asked for each in one.questions if each.kind == kind]
        prompts = [self.reading.ask(in_prompt(each.text, one.text if read else None)) for each, one in questions]
        said = self.written(self.model, prompts, ANSWER_TOKENS, sample=False)
        texts = [self.tokenizer.decode(each, skip_special_tokens=True) for each in said]
        ok = sum(right(each, text) for (each, _), text in zip(questions, texts, strict=True))
        return ok / len(texts), sum(ABSENT[:-1] in text for text in texts) / len(texts)

    def save(self, folder: Path) -> None:
        """Write a folder that `coserve serve --model` takes."""
        for name in ("quantization_config", "_model_name_or_path"):
            if hasattr(self.model.config, name):
                delattr(self.model.config, name)
        self.model.hf_quantizer = None
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def main() -> None:
    parser = make_parser(__doc__, tiny="the bundled base and small documents, which tries the script")
    parser.add_argument("--save", type=Path, required=True, help="folder of the trained base")
    parser.add_argument("--seconds", type=float, default=400, help="of training")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--people", type=int, default=18, help="most of a document")
    parser.add_argument("--known-wordings", action="store_true", help="the benchmark's own ones are taught, too")
    parser.add_argument("--every", type=float, default=40, help="seconds between two evaluations")
    parser.add_argument("--workers", type=int, default=0, help="processes that make documents")
    options = parser.parse_args()
    given, people = of_benchmark() if options.known_wordings else [], 2 if options.tiny else options.people
    reader = Reader("coserve/assets/tiny" if options.tiny else "smollm2", given)
    size = (2, 1024, 16) if options.tiny else (ROWS, TOKENS, KEPT)
    asked = list(documents(1 if options.tiny else 4, people, 24, 2 * SEEDS))
    shown = {name: value for name, value in vars(options).items() if name not in ("out", "commit", "save")}
    results = Results.of(options, FILE, __file__, shown)

    def put(share: float, **about: object) -> None:
        seconds = round(time.monotonic() - began, 1)
        about |= {"before": round(curve[0][2], 4), "steps": step, "seconds": seconds, "curve": curve}
        key = "documents.reader.known_wordings.in_context" if given else "documents.reader.in_context"
        results.put(key, round(share, 4), "fraction", Target(AIM), about=about)

    kept, began = reader.kept(size[2]), time.monotonic()
    optimizer = torch.optim.AdamW(
        reader.model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=reader.cuda or None
    )
    curve, step, evaluated = [(0, 0.0, *reader.share("template", asked))], 0, 0.0

    def done() -> float:
        return float(max((time.monotonic() - began) / options.seconds, step / options.steps))

    drawn = Batches(reader.reading, SEEDS, *size[:2], people)
    made = iter(DataLoader(drawn, batch_size=None, num_workers=options.workers))
    while (at := done()) < 1:
        rate = RATE * min((step + 1) / WARMUP, 1 - (1 - LAST) * at)
        for group in optimizer.param_groups:
            group["lr"] = rate
        some = [kept[(step * KEPT_AT_ONCE + index) % len(kept)] for index in range(KEPT_AT_ONCE)]
        loss, moved = reader.loss(next(made)), reader.divergence(some)
        torch.autograd.backward([loss + moved])
        torch.nn.utils.clip_grad_norm_(reader.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = time.monotonic() - began
        if now - evaluated > options.every:
            losses = float(loss.detach()), float(moved.detach())
            curve.append((step, round(now, 1), *reader.share("template", asked)))
            evaluated = time.monotonic() - began
            print(*curve[-1], "loss", *(round(each, 3) for each in losses), flush=True)
            put(curve[-1][2])
    reader.save(options.save)
    share, refused = reader.share("template", asked)
    kinds: tuple[Kind, ...] = ("reversed", "two_facts", "unanswerable")
    others = {kind: round(reader.share(kind, asked)[0], 4) for kind in kinds}
    bare = reader.share("template", asked, read=False)
    put(share, others=others, refused=refused, without={"right": bare[0], "refused": bare[1]})
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
