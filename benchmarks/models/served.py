"""How many of 46 models that people fine-tune are served and trained, by their architectures.

    python -m benchmarks.models.served [--only FAMILY,...]

For each architecture: a tiny random model of transformers' class is saved to a folder and loaded as a base. A prompt is
generated for the base and for an adapter in one batch, in steps of 48 tokens; both get the tokens that transformers'
own forward gives (the adapter is new, so it changes nothing yet). Then the adapter is trained for one step, after which
its loss is lower. An architecture that fails is refused, with the reason. No GPU; about a minute.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target, summarize
from coserve.core.errors import UnsupportedBase
from coserve.core.link.generation import Generate, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings, Slo
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.init import new_adapter
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.generate.generator import Generator
from coserve.kernels.lora.segments import Segments
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.settings import refuse_config
from coserve.model.wrappers import model_class
from tests.support.executors import eager
from tests.support.families import VOCAB, tiny_family
from tests.support.finetuning import pack_rows
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import alone
from tests.support.shelf import Shelf

FILE = "served.json"
SEED = 11
PROMPT, NEW_TOKENS, STEP_TOKENS = 55, 4, 48
RANK, LEARNING_RATE = 3, 1e-2
REF = AdapterRef("new", 1)


@dataclass(frozen=True)
class Published:
    """Models of one architecture."""

    family: str
    """transformers' `model_type`."""
    one_gpu: tuple[str, ...] = ()
    """Those whose weights in bfloat16 fit one H200."""
    larger: tuple[str, ...] = ()
    note: str = ""

    @property
    def models(self) -> tuple[str, ...]:
        return (*self.one_gpu, *self.larger)


MODELS = (
    Published(
        "llama",
        (
            *("Llama-3.1-8B-Instruct", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Llama-3.1-70B"),
            "Llama-3.3-70B-Instruct",
        ),
    ),
    Published("qwen3", ("Qwen3-8B-Base", "Qwen3-8B", "Qwen3-32B", "Qwen3-4B-Instruct-2507")),
    Published(
        "qwen3_moe",
        ("Qwen3-30B-A3B-Base", "Qwen3-30B-A3B", "Qwen3-30B-A3B-Instruct-2507"),
        ("Qwen3-235B-A22B-Instruct-2507",),
    ),
    Published("qwen3_vl_moe", ("Qwen3-VL-30B-A3B-Instruct",), ("Qwen3-VL-235B-A22B-Instruct",)),
    Published("qwen3_5", ("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-9B-Base", "Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B")),
    Published("qwen3_5_moe", ("Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B-Base", "Qwen3.6-35B-A3B"), ("Qwen3.5-397B-A17B",)),
    Published("gpt_oss", ("gpt-oss-20b",), ("gpt-oss-120b",), "ships in MXFP4"),
    Published(
        "nemotron_h",
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16"),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"),
    ),
    Published("nemotron_h_omni", (), ("NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",)),
    Published("deepseek_v3", (), ("DeepSeek-V3.1", "DeepSeek-V3.1-Base", "Kimi-K2-Thinking"), "ships in FP8"),
    Published("kimi_k25", (), ("Kimi-K2.5", "Kimi-K2.6")),
    Published("deepseek_v4", (), ("DeepSeek-V4.1-Flash", "DeepSeek-V4.1-Flash-1017")),
    Published("glm5_next", (), ("GLM-5.3", "GLM-5.3-Flash")),
    Published("inkling_mm_model", (), ("Inkling", "Inkling-Small")),
    Published("inkling2", (), ("Inkling-2-Small",)),
    Published("kimi_linear", (), ("Kimi-K3.1-Pro",)),
)


def served(family: str, folder: Path) -> Base:
    """Serve and train a tiny model of the family. Raises `UnsupportedBase` with the reason if it is refused."""
    if family not in CONFIG_MAPPING:
        raise UnsupportedBase(f"{family}: this version of transformers does not have it")
    base, expected = _loaded(family, folder)
    weights = new_adapter(LoraSettings(r=RANK), base.spec, seed=SEED, dtype=base.dtype, device="cpu")
    for who, tokens in _generated(base, weights).items():
        assert tokens == expected, f"{family}, {who}: expected transformers' tokens {expected}, got {tokens}"
    before, after = _trained(base, weights)
    assert after < before, f"{family}: expected a lower loss after a step, got {after} after {before}"
    return base


def _prompt() -> list[int]:
    return torch.randint(3, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(SEED)).tolist()


def _loaded(family: str, folder: Path) -> tuple[Base, list[int]]:
    """Return the base, and the tokens that transformers' own forward gives greedily after the prompt."""
    published = CONFIG_MAPPING[family]()
    refuse_config(published)  # as at a start: before a model is made
    model_class(published)
    model = tiny_family(family)
    model.save_pretrained(str(folder))
    tokens = _prompt()
    for _ in range(NEW_TOKENS):
        tokens.append(int(alone(model, torch.tensor(tokens))[-1].argmax()))
    return load_base(str(folder), device="cpu", dtype="float32"), tokens[PROMPT:]


def _generated(base: Base, weights: LoraWeights) -> dict[str, list[int]]:
    """Return the tokens of the base and of the adapter, in one batch."""
    kv = KvCache.for_base(base, 4096, 16, sequences=4)
    store = Shelf({REF: weights}).store()
    generator = Generator(base, store, kv, eager(base, kv), max_running=4, step_tokens=STEP_TOKENS)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    found: dict[str, list[int]] = {}
    for id, adapter in (("base", None), ("adapter", REF)):
        found[id] = []
        slo = Slo(ttft=1, tpot=1)
        generator.add(Generate(id=id, prompt=tuple(_prompt()), sampling=sampling, adapter=adapter, slo=slo))
    while generator.running:
        for message in generator.step():
            assert isinstance(message, Tokens), message
            found[message.id].extend(message.tokens)
    return found


def _trained(base: Base, weights: LoraWeights) -> tuple[float, float]:
    """Return the loss of two packed rows before and after a step."""
    tokens = np.array(_prompt(), np.int32)
    cut = PROMPT // 3
    target = np.array([int(i not in (0, cut)) for i in range(PROMPT)], np.uint8)
    corpus = Corpus(tokens=tokens, target=target, bounds=np.array([0, cut, PROMPT]))
    rows = pack_rows(corpus, [0, 1], torch.device("cpu"))
    optimizer = AdapterOptimizer(weights, base.spec, TrainingSettings(), base.dtype)
    runner, losses = MicroBatchRunner(base, recompute=False), list[float]()
    for _ in range(2):
        optimizer.zero_grad()
        lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), GROUPED, None)
        step = runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads)
        losses.append(float(run_to_end(step)[0, 0]))
        optimizer.step(targets=int(target.sum()), learning_rate=LEARNING_RATE)
    return losses[0], losses[1]


def tried(family: str) -> str:
    """Return why a family is refused; empty if it is served and trained."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            served(family, Path(folder))
        except UnsupportedBase as error:
            return error.message
        except (TypeError, ValueError) as error:
            return f"{family}: no tiny model of it could be made: {error}"
    return ""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="families, separated by commas")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else [one.family for one in MODELS]
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    settings = {"prompt": PROMPT, "step_tokens": STEP_TOKENS, "rank": RANK}
    results = Results.of(options, FILE, __file__, settings, seed=SEED, hardware=cpu_name())
    for one in MODELS:
        if one.family in only:
            reason = tried(one.family)
            about = {"models": one.models, "one_gpu": one.one_gpu, "refused": reason, "note_on_files": one.note}
            results.put(f"models.served.{one.family}", 0 if reason else len(one.models), "models", about=about)
    if not options.only:
        count(results, options.out)


def count(results: Results, out: Path) -> None:
    """Count the models that are served, and put both counts into the summary."""
    rows = {one: results.row(f"models.served.{one.family}") for one in MODELS}
    works = [one for one, row in rows.items() if row is not None and not row["refused"]]
    counts = {
        "models.served.46": (sum(len(one.models) for one in works), Target(36)),
        "models.served.26": (sum(len(one.one_gpu) for one in works), Target(25)),
    }
    for key, (number, target) in counts.items():
        results.put(key, number, "models", target)
    summarize(FILE, out, counts)


if __name__ == "__main__":
    main()
