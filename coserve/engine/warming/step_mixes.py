"""The generation steps that a warm-up runs: decodes, prefill chunks and mixes of many sizes."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.core.sampling import SamplingParams
from coserve.kernels.lora.segmented.plan import DECODE_ROWS, PREFILL_TILE_ROWS

PROMPTS = (
    *(2, 3, 7, 12, 16, 24, 33, 48, 64, 65, 96, 100, 128, 130, 192, 200, 256, 300, 384, 500, 512, 640, 700, 768, 900),
    *(1024, 1100, 1280, 1536, 1800, 2048),
)
"""Prefill tokens of a step."""
DECODES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 24, 28, 31, 32, 33, 40, 48, 50, 56, 63, 64, 80, 96, 100, 128, 160),
    *(192, 256),
)
"""Sequences of a decode step."""
TILE, DENSE = PREFILL_TILE_ROWS, 2048
CONTEXTS = (0, 700)
"""Tokens already in the KV cache."""
SHORT_PROMPTS, SHORT = (8, 12, 16, 24, 32, 48, 64), DECODE_ROWS[1] - 4
"""Numbers of short prompts in a step, and tokens of each: each prompt has its own tile in the decode kernels."""
DECODES_WITH_PREFILL = (1, 3, 9, 17)
"""Sequences that decode in a step with prefill."""
RARE = (
    *((20, 2, 29), (20, 1, 1500), (36, 2, 150), (36, 3, 600), (36, 2, 1000), (44, 1, 29)),
    *((52, 1, 1500), (133, 1, 7), (133, 1, 333), (200, 1, 64), (200, 5, 200)),
)
"""Rare steps: sequences that decode, prompts in the same step, and tokens of each prompt. Together with the other
mixes, and the adapters of `adapter_counts`, they cover the LoRA kernels of nearly every step
(`tests/kernels/test_serving_sizes.py`)."""

SAMPLED = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.2),
)
"""Every kind of sampling."""


@dataclass(frozen=True)
class Mix:
    """A generation step: the `tokens` of each sequence, beginning at `position`."""

    tokens: tuple[int, ...]
    position: int

    @property
    def decodes(self) -> bool:
        """Whether no sequence has more than one token."""
        return max(self.tokens) == 1


def step_mixes(max_running: int, step_tokens: int, context: int) -> list[Mix]:
    """Steps of at most `max_running` sequences, `step_tokens` tokens and `context` positions: decodes, prefill of one,
    four and many short prompts, and mixes of both."""
    decodes = [(1,) * n for n in DECODES if n <= max_running]
    prompts = [tokens for tokens in (*PROMPTS, step_tokens) if tokens <= step_tokens]
    single = [(tokens,) for tokens in prompts]
    several = [(tokens // 4,) * 4 for tokens in prompts if tokens >= 32 and max_running >= 4]
    short = [(SHORT,) * n for n in SHORT_PROMPTS if n <= max_running and n * SHORT <= step_tokens]
    mixed = [
        (*(1,) * n, tokens)
        for n in DECODES_WITH_PREFILL
        for tokens in prompts[::3]
        if n < max_running and n + tokens <= step_tokens
    ]
    found = [
        Mix(tokens, position)
        for position in CONTEXTS
        for tokens in (*decodes, *single, *several, *short, *mixed)
        if position + max(tokens) <= context
    ]
    return list(dict.fromkeys(found))


def rare_mixes(max_running: int, step_tokens: int, context: int) -> list[Mix]:
    """Rare steps with many decodes next to prompts, at position 0: they need LoRA kernels that no step of `step_mixes`
    needs."""
    found = [(*(1,) * decodes, *(tokens,) * prompts) for decodes, prompts, tokens in RARE]
    return [Mix(mix, 0) for mix in found if len(mix) <= max_running and sum(mix) <= step_tokens and max(mix) <= context]


def first_steps(max_running: int, step_tokens: int, context: int, *, decodes: bool) -> list[Mix]:
    """Return a few steps of decodes, prompts and both, all at position 0. `decodes` False: prompts only. A prompt
    longer than `context` is split into several."""
    prompts = (17,), (512,), (step_tokens,)
    steps = ((1,), (1,) * 4, (1,) * 16, (1,) * max_running, (1, 160), *prompts) if decodes else prompts
    split = [
        tuple(min(context, tokens - done) for tokens in step for done in range(0, tokens, context)) for step in steps
    ]
    return [Mix(each, 0) for each in split if sum(each) <= step_tokens and len(each) <= max_running]


def adapter_counts(mix: Mix, adapters: int) -> list[int]:
    """Numbers of adapters to run a step with, at most `adapters`: one, a quarter and half of the sequences, and one for
    each."""
    most = min(len(mix.tokens), adapters)
    return sorted({min(1, most), -(-most // 4), -(-most // 2), most})


def first_micro_batches(most: int) -> list[int]:
    """Tokens of a few micro-batches of up to `most` tokens: a full one, and sizes not divisible by vector widths, as
    real texts have."""
    return sorted({max(1, size) for size in (min(most, 512) - 3, most - 3, most)})


def micro_batch_sizes(most: int) -> list[int]:
    """Tokens of micro-batches that need nearly every training kernel for up to `most` tokens: kernels depend on the
    number of tiles, up to `DENSE` tokens on each."""
    dense = range(TILE, min(most, DENSE) + 1, TILE)
    sparse = range(DENSE, most + 1, 8 * TILE)
    return sorted(size for size in {1, 2, 16, most - 3, most, *dense, *sparse} if 0 < size <= most)
