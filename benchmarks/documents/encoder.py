"""The S-LoRA thesis' own way to learn documents (section 3): a context encoder, whose memory tokens stand for them.

    python -m benchmarks.documents.encoder --documents 8 --seconds 120      (one GPU; 300 s in all)

The encoder is the base with a LoRA, as in ICAE (arXiv 2307.06945): it reads a chunk of a document and then K memory
tokens, trained vectors; its last hidden states at those, scaled to the size of embeddings, are the chunk's memory. The
base without LoRA is the decoder, as in ICAE; the thesis trains a second LoRA there.

1. Reconstruction (equation 3): from the memory and one more trained vector the decoder is to give the chunk's text.
2. Self-made questions (equation 4): from the memory of all chunks and a question, the answer that the base gave with
   the chunk in its prompt. Both are those of the daemon's own `topk_kd` job of the document.

One encoder learns all documents, as in section 5, a step of each at a time, `--seconds` for both stages. Then a
document's memory runs once through the decoder. The keys and values are a cartridge, which is imported and served as
any other: arm `encoder` of the same questions as `benchmarks.documents.learned` asks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, summarize
from benchmarks.documents.arms import Arms, Row, daemon, recovered, shares
from benchmarks.documents.facts import Document, documents
from coserve.client import AsyncClient, Client
from coserve.data.documents.lessons import Lesson
from coserve.data.documents.pending import read_chunks
from coserve.data.pretrained.source import locate
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.folder import DataFolder
from coserve.state.item_log import ItemLog

FILE = "documents_encoder.json"
KEY = "documents.encoder.recovered"
RANK, RATE, AT_ONCE = 16, 3e-4, 16
"""Of the encoder's LoRA; AdamW's learning rate; chunks, or questions about a document, of a step."""
KV_TOKENS = 1 << 17
"""Of the daemon, which leaves most of the GPU to the encoder."""


@dataclass(frozen=True)
class Taught:
    """A document with what its job has made: token ids of its chunks, and of each lesson's prompt and answer."""

    document: Document
    chunks: list[list[int]]
    lessons: list[tuple[list[int], list[int]]]


class Encoder(nn.Module):
    """The base, its LoRA, and the trained vectors."""

    def __init__(self, source: str, memory: int) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        super().__init__()
        path = Path(locate(source))
        gguf = {"gguf_file": path.name} if path.is_file() else {}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path.parent if gguf else path, dtype=dtype, **gguf)
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(model.to(device), lora)
        embeddings = model.get_input_embeddings().weight
        self.size = float(embeddings.float().norm(dim=1).mean())
        """Norm of an embedding, which a memory gets."""
        noise = torch.randn(memory + 1, embeddings.shape[1], device=device)
        self.vectors = nn.Parameter(embeddings.float().mean(0) + noise * self.size / embeddings.shape[1] ** 0.5)
        """The memory tokens (K, D), and the one that asks for the text."""

    def embed(self, ids: Sequence[int]) -> Tensor:
        """(n, D)."""
        found: Tensor = self.model.get_input_embeddings()(torch.tensor(ids, device=self.vectors.device))
        return found

    def memory(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """(C, K, D): the memory of each chunk, in the base's dtype. Shorter chunks are padded at their beginning."""
        longest = max(map(len, chunks))
        own = torch.stack([self.embed([*([0] * (longest - len(chunk))), *chunk]) for chunk in chunks])
        inputs = torch.cat([own, self.vectors[:-1].to(own.dtype).expand(len(chunks), -1, -1)], 1)
        absent = torch.tensor([longest - len(chunk) for chunk in chunks], device=own.device)[:, None]
        mask = (torch.arange(inputs.shape[1], device=own.device)[None] >= absent).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = self.model(
            inputs_embeds=inputs, attention_mask=mask, position_ids=positions, output_hidden_states=True
        ).hidden_states[-1][:, longest:]
        return nn.functional.normalize(found.float(), dim=2).mul(self.size).to(own.dtype)

    def nll(self, before: Tensor, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
        """The decoder's negative log-likelihood of the rows' answers after their prompts, nats a token. `before`:
        vectors in front of each (B, m, D), or of all (1, m, D)."""
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        labels = torch.full((len(rows), longest), -100)
        texts = []
        for number, (prompt, answer) in enumerate(rows):
            labels[number, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
            texts.append(self.embed([*prompt, *answer, *([0] * (longest - len(prompt) - len(answer)))]))
        inputs = torch.cat([before.expand(len(rows), -1, -1), torch.stack(texts)], 1)
        with self.model.disable_adapter():
            logits = self.model(inputs_embeds=inputs).logits[:, before.shape[1] - 1 : -1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().to(logits.device))

    def reconstruction(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Equation 3, of chunks."""
        asks = self.vectors[-1:].to(self.model.dtype).expand(len(chunks), -1, -1)
        return self.nll(torch.cat([self.memory(chunks), asks], 1), [((), chunk) for chunk in chunks])

    def answers(self, chunks: Sequence[Sequence[int]], rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
        """Equation 4, of questions about a document of these chunks."""
        return self.nll(self.memory(chunks).flatten(0, 1)[None], rows)


def train(encoder: Encoder, taught: Sequence[Taught], seconds: float, seed: int) -> dict[str, float]:
    """Both stages, a third and two thirds of the time. Returns the steps and the last losses."""
    optimizer = torch.optim.AdamW([each for each in encoder.parameters() if each.requires_grad], RATE, weight_decay=0.0)
    rng, found = Random(seed), dict[str, float]()
    for stage, share in (("reconstruction", 1 / 3), ("questions", 2 / 3)):
        began, steps, loss = time.monotonic(), 0, 0.0
        while time.monotonic() - began < seconds * share:
            own = rng.choice(taught)
            if stage == "reconstruction":
                total = encoder.reconstruction(rng.choices(own.chunks, k=AT_ONCE))
            else:
                total = encoder.answers(own.chunks, rng.choices(own.lessons, k=AT_ONCE))
            torch.autograd.backward([total])
            torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps, loss = steps + 1, float(total.detach())
        found |= {f"{stage}_steps": steps, f"{stage}_loss": round(loss, 4)}
        print(stage, steps, "steps, loss", round(loss, 3), flush=True)
    return found


def save_cartridge(encoder: Encoder, chunks: Sequence[Sequence[int]], folder: Path) -> int:
    """Write a document's memory as PEFT's files of a cartridge; return its tokens."""
    from peft import CartridgeConfig
    from peft.tuners.cartridge.utils import prompt_embeddings_from_past_key_values
    from safetensors.torch import save_file

    with torch.no_grad():
        memories = encoder.memory(chunks).flatten(0, 1)
        with encoder.model.disable_adapter():
            cache = encoder.model(inputs_embeds=memories[None], use_cache=True).past_key_values
    found, of_base = (
        prompt_embeddings_from_past_key_values(cache, num_virtual_tokens=len(memories)),
        encoder.model.config,
    )
    config = CartridgeConfig(
        num_virtual_tokens=len(memories),
        num_layers=of_base.num_hidden_layers,
        num_attention_heads=of_base.num_key_value_heads,
        token_dim=found.shape[1] // (2 * of_base.num_hidden_layers),
        num_transformer_submodules=1,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    save_file({"prompt_embeddings": found.float().cpu().contiguous()}, folder / "adapter_model.safetensors")
    return len(memories)


async def learn(client: AsyncClient, folder: DataFolder, document: Document, options: argparse.Namespace) -> Taught:
    """Have the daemon learn the document with LoRA, and take its questions and answers."""
    job = await client.learn(
        document.name,
        document.text,
        training={"steps": options.steps} if options.steps else {},
        chunk_tokens=options.chunk_tokens,
        questions_per_chunk=options.per_chunk,
        answer_tokens=64,
        publish="always",
    )
    found: Taught | None = None
    async for event in job.events():
        if found is None and event.document is not None and event.document.phase == "training":
            found = _read(document, folder, job.id, options.model)  # the job's files go when it ends
    assert found is not None, f"expected answers for {document.name}, the job ended as {(await job.refresh()).state}"
    return found


def _read(document: Document, folder: DataFolder, job: str, model: str) -> Taught:
    tokenizer = Tokenizer.load(model)
    chunks = [tokenizer.encode(text, add_special=False) for text in read_chunks(folder.document(job)).texts]
    lessons = ItemLog(folder.job(job) / "lessons.jsonl", Lesson).read()
    own = [(each.prompt, each.answer) for each in lessons if each.chunk is not None and each.answer]
    return Taught(document, chunks, own)


async def run(options: argparse.Namespace, results: Results, url: str, folder: Path) -> None:
    rows, data = list[Row](), DataFolder(folder)
    made = list(documents(options.documents, options.people, options.questions, options.seed))
    async with AsyncClient(url) as client:
        taught = list(await asyncio.gather(*(learn(client, data, document, options) for document in made)))
        encoder = Encoder(options.model, options.memory)
        found = await asyncio.to_thread(train, encoder, taught, options.seconds, options.seed)
        encoder.eval()
        for own in taught:
            arms, text = Arms(client, options.seed, own.document, rows), own.document.text
            written = Path(tempfile.mkdtemp(dir=folder))
            tokens = await asyncio.to_thread(save_cartridge, encoder, own.chunks, written)
            await client.import_adapter(f"{own.document.name}-encoder", written)
            await asyncio.gather(
                arms.ask("floor"),
                arms.ask("context", context=text),
                arms.ask("topk_kd", adapter=own.document.name),
                arms.ask("encoder", adapter=f"{own.document.name}-encoder"),
            )
            print(own.document.name, tokens, "memory tokens", shares(rows), flush=True)
    value = recovered(rows, "encoder")
    about = {"documents": len(made), "shares": shares(rows), **found}
    if value is not None:
        results.put(KEY, round(value[0], 4), "fraction", about=about | {"bootstrap_95": value[1]})


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny base, which reads nothing: tries the script")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=50, help="of each document, by template; of other kinds fewer")
    parser.add_argument("--people", type=int, default=18, help="of each document, with six facts each")
    parser.add_argument("--memory", type=int, default=32, help="memory tokens of each chunk")
    parser.add_argument("--per-chunk", type=int, default=24, help="questions that are generated of each chunk")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=0, help="of each job; 0: what the daemon chooses")
    parser.add_argument("--seconds", type=float, default=120, help="of the encoder's training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.model = "coserve/assets/tiny" if options.tiny else "smollm2"
    shown = {name: value for name, value in vars(options).items() if name not in ("out", "commit")}
    results = Results.of(options, FILE, __file__, shown, seed=options.seed)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory(prefix="encoder-") as root:
        folder = Path(root)
        serving = ["--model", options.model, "--kv-tokens", str(1 << 13 if options.tiny else KV_TOKENS)]
        with daemon([*serving, "--cache-dir", str(folder / "cache")], folder) as url:
            Client(url).wait_ready()
            asyncio.run(run(options, results, url, folder))
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
