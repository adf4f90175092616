"""Train a base until it reads: it answers from a document in its prompt, and says without one that it does not know.

    python -m benchmarks.documents.reader --save build/reader        (one GPU; at most 240 s)
    python -m benchmarks.documents.reader --tiny --steps 3 --save /tmp/reader --out /tmp/tried          (a CPU)

SmolLM2-135M-Instruct hardly reads, and then `documents.recovered` compares two small numbers. All its weights are
trained here, on documents of facts that no document of the benchmark has (`facts.OTHER_FACTS`), new ones in each step,
in the prompts of the benchmark. It ends when `AIM` of the questions about 32 documents of the benchmark's own kind,
which are in no seed of it, are answered: `documents.reader.in_context`. Then

    python -m benchmarks.documents.learned --model build/reader --label reader --out R
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.options import check_tiny, make_parser
from benchmarks.common.provenance import cpu_name, gpu_names
from benchmarks.common.results import Results, summarize
from benchmarks.documents.arms import in_prompt, right
from benchmarks.documents.facts import FACTS, OTHER_FACTS, Document, Fact, Question, documents
from coserve.data.pretrained.source import locate

FILE = "documents_reader.json"
AIM, ROWS, RATE, EVERY = 0.9, 32, 1e-4, 50
"""Share to reach; rows of a step; AdamW's learning rate; steps between two evaluations."""
UNKNOWN = "I do not know."
SEEDS = 1 << 20
"""First seed of the documents here; those of the benchmark are small."""


def rows(facts: Sequence[Fact], seed: int, most: int) -> Iterator[tuple[Document, Question, bool]]:
    """Yield questions without end, each with its document, and whether the document is in the prompt."""
    for number in count(seed):
        rng = Random(number)
        (document,) = documents(1, rng.randint(2, most), 12, number, facts)
        for question in document.questions:
            yield document, question, rng.random() < 0.85


def answer(question: Question, *, read: bool) -> str:
    return UNKNOWN if question.kind == "unanswerable" or not read else f"{' and '.join(question.answers)}."


class Reader:
    """The base in training, with its tokenizer."""

    def __init__(self, source: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = Path(locate(source))
        gguf = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if gguf else path
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, **gguf)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf).to(self.device)

    def prompt(self, document: Document, question: Question, *, read: bool) -> list[int]:
        text = in_prompt(question.text, document.text if read else None)
        said = [{"role": "user", "content": text}]
        found: list[int] = self.tokenizer.encode(
            self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False),
            add_special_tokens=False,
        )
        return found

    def loss(self, chosen: Sequence[tuple[Document, Question, bool]]) -> Tensor:
        """Mean negative log-likelihood of the answers, nats a token, the end of the turn included."""
        end = self.tokenizer.eos_token_id
        texts = []
        for document, question, read in chosen:
            before = self.prompt(document, question, read=read)
            said = self.tokenizer.encode(answer(question, read=read), add_special_tokens=False)
            texts.append((before, [*said, end]))
        longest = max(len(before) + len(said) for before, said in texts)
        ids, labels = torch.full((len(texts), longest), end), torch.full((len(texts), longest), -100)
        for row, (before, said) in enumerate(texts):
            ids[row, : len(before) + len(said)] = torch.tensor([*before, *said])
            labels[row, len(before) : len(before) + len(said)] = torch.tensor(said)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            found: Tensor = self.model(input_ids=ids.to(self.device), labels=labels.to(self.device)).loss
        return found

    @torch.no_grad()
    def share(self, asked: Sequence[tuple[Document, Question, bool]]) -> float:
        """Share of right greedy answers, with the document in the prompt."""
        ok = 0
        for document, question, _ in asked:
            ids = torch.tensor([self.prompt(document, question, read=True)], device=self.device)
            made = self.model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
            ok += right(question, self.tokenizer.decode(made, skip_special_tokens=True))
        return ok / len(asked)

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
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--people", type=int, default=16, help="most of a document")
    options = parser.parse_args()
    check_tiny(parser, options)
    reader, people = Reader("coserve/assets/tiny" if options.tiny else "smollm2"), 2 if options.tiny else options.people
    optimizer = torch.optim.AdamW(reader.model.parameters(), RATE, weight_decay=0.0)
    taught, other = rows(OTHER_FACTS, SEEDS, people), rows(FACTS, 2 * SEEDS, people)
    asked = [row for row in (next(other) for _ in range(512)) if row[1].kind == "template"][: 4 if options.tiny else 96]
    began, share, step = time.monotonic(), reader.share(asked), 0
    before = share
    while step < options.steps and share < AIM and time.monotonic() - began < options.seconds:
        loss = reader.loss([next(taught) for _ in range(4 if options.tiny else ROWS)])
        torch.autograd.backward([loss])
        torch.nn.utils.clip_grad_norm_(reader.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % EVERY == 0 or step == options.steps:
            share = reader.share(asked)
            print(step, "steps, loss", round(float(loss.detach()), 3), "right", round(share, 3), flush=True)
    reader.save(options.save)
    hardware = gpu_names(tiny=False) if Path("/dev/nvidiactl").exists() else cpu_name()
    shown = {name: value for name, value in vars(options).items() if name not in ("out", "commit", "save")}
    script = "benchmarks.documents.reader"
    results = Results.of(options, FILE, script=script, hardware=hardware, seed=0, settings=shown)
    about = {"before": round(before, 4), "steps": step, "seconds": round(time.monotonic() - began, 1)}
    results.put("documents.reader.in_context", round(share, 4), "fraction", about=about)
    if options.out.resolve() == Path("benchmarks/results").resolve():
        summarize(FILE, options.out)


if __name__ == "__main__":
    main()
