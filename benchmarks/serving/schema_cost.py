"""What a JSON schema in every row costs a decode of 64 rows, compiled before: `clients.schema_cost`, and
`clients.schema_cost.max_length` with strings of a greatest length, whose last tokens take the longest masks.

    python -m benchmarks.serving.schema_cost --out benchmarks/results
    TRITON_INTERPRET=1 python -m benchmarks.serving.schema_cost --tiny --out /tmp/tried

The 8B shape of `case.py`, at temperature 1. Its vocabulary is the bundled tokenizer's with random words up to the
shape's width, since the time to compute a mask grows with the words. Random weights hardly ever end a string: in all
runs a quote has a bias with which a string has some six tokens. Runs with and without the schemas take turns.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import math
import pstats
import random
import statistics
import string
from dataclasses import replace

import msgspec
import tokenizers

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, Target
from benchmarks.serving.case import FULL, SEED, TINY, Bench, Load, make_base
from coserve.core.grammar import Grammar
from coserve.core.sampling import SamplingParams
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.generate.grammars import Grammars

KEY, REPEATS, STRING_TOKENS = "clients.schema_cost", 5, 6
ROWS, PROMPT = 64, 16
"""Requests at once, and tokens of each prompt."""


def tickets(**bounds: dict[str, int]) -> Grammar:
    """A list of support tickets, longer than any answer here: every row runs to its last token. `bounds`: of the
    strings `subject` and `tags`."""
    ticket = {
        "type": "object",
        "properties": {
            "subject": {"type": "string"} | bounds.get("subject", {}),
            "urgency": {"enum": ["low", "normal", "high"]},
            "product": {"type": "integer", "minimum": 0, "maximum": 99999},
            "tags": {"type": "array", "items": {"type": "string"} | bounds.get("tags", {}), "maxItems": 4},
        },
        "required": ["subject", "urgency", "product"],
        "additionalProperties": False,
    }
    return Grammar("json_schema", json.dumps({"type": "array", "minItems": 1000, "items": ticket}))


SCHEMAS = {
    KEY: tickets(),
    f"{KEY}.max_length": tickets(subject={"maxLength": 60}, tags={"maxLength": 12}),
}


def wide_tokenizer(vocab: int) -> Tokenizer:
    """The bundled tokenizer with random words up to `vocab` tokens."""
    described = json.loads(Tokenizer.load("bundled").serialised())
    words, chance = described["model"]["vocab"], random.Random(SEED)
    while len(words) < vocab - 256:
        word = "".join(chance.choices(string.ascii_lowercase, k=chance.randrange(2, 9)))
        words.setdefault(chance.choice(("", "Ġ")) + word, len(words))
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    return Tokenizer(backend, special_tokens={"eos_token": "<|endoftext|>"})


async def measure(bench: Bench, load: Load, repeats: int) -> dict[str, list[float]]:
    """Return tokens a second without a schema, under the empty key, and with each, in rounds of runs."""
    found: dict[str, list[float]] = {"": [], **{key: [] for key in SCHEMAS}}
    async with bench.serving():
        for i in range(repeats + 1):
            for key, speeds in found.items():
                asked = load.make_requests(f"{key}/{i}", bench.shape.vocab)
                asked = [msgspec.structs.replace(one, grammar=SCHEMAS.get(key)) for one in asked]
                speeds.append(load.requests * load.output / await bench.serve(asked))
    return {key: speeds[1:] for key, speeds in found.items()}  # the first round warms up


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, to try the script")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes in a round of runs")
    options = parser.parse_args()
    shape = replace(TINY, vocab=4608) if options.tiny else replace(FULL, max_running=ROWS, step_tokens=ROWS * PROMPT)
    tokenizer = wide_tokenizer(shape.vocab)
    quote = json.loads(tokenizer.serialised())["model"]["vocab"]['"']
    ends = {quote: math.log(shape.vocab / STRING_TOKENS)}
    load = Load(ROWS, PROMPT, 256, sampling=SamplingParams(temperature=1.0, logit_bias=ends))
    load = replace(load, requests=4, output=6) if options.tiny else load
    grammars = Grammars(lambda: tokenizer, shape.vocab, pinned=shape.device == "cuda")
    for schema in SCHEMAS.values():
        grammars.compiled(schema)
    bench = Bench(make_base(shape), shape, grammars=grammars)
    bench.capture()
    if options.profile:
        with cProfile.Profile() as profile:
            asyncio.run(measure(bench, load, 0))
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    plain, *masked = asyncio.run(measure(bench, load, 1 if options.tiny else REPEATS)).values()
    results = Results.of(options, "schema_cost.json", __file__, vars(shape), seed=SEED)
    for key, speeds in zip(SCHEMAS, masked, strict=True):
        costs = [1 - b / a for a, b in zip(plain, speeds, strict=True)]
        about = {"tok_s": round(statistics.median(plain), 1), "tok_s_schema": round(statistics.median(speeds), 1)}
        target = Target(0.03, most=True) if key == KEY else None
        results.put(key, round(statistics.median(costs), 4), "fraction", target, costs, about)


if __name__ == "__main__":
    main()
