"""What a JSON schema in every row costs a decode of 64 rows: `clients.schema_cost`, compiled before.

    python -m benchmarks.serving.schema_cost --out benchmarks/results
    TRITON_INTERPRET=1 python -m benchmarks.serving.schema_cost --tiny --out /tmp/tried

The 8B shape of `case.py`, at temperature 1. Its vocabulary is the bundled tokenizer's with random words up to the
shape's width, since the time to compute a mask grows with the words. Random weights hardly ever end a string: in both
runs a quote has a bias with which a string has some six tokens, else each would run to its greatest length.
Runs with and without the schema take turns.
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

from benchmarks.common.options import check_tiny, make_parser
from benchmarks.common.results import Results, Target
from benchmarks.serving.case import FULL, SEED, TINY, Bench, Load, hardware, make_base
from coserve.core.grammar import Grammar
from coserve.core.sampling import SamplingParams
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.generate.grammars import Grammars

KEY, REPEATS, STRING_TOKENS = "clients.schema_cost", 5, 6
TICKET = {
    "type": "object",
    "properties": {
        "subject": {"type": "string", "maxLength": 60},
        "urgency": {"enum": ["low", "normal", "high"]},
        "product": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["subject", "urgency", "product"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps({"type": "array", "minItems": 1000, "items": TICKET}))
"""Longer than any answer here: every row runs to its last token."""


def wide_tokenizer(vocab: int) -> Tokenizer:
    """The bundled tokenizer with random words up to `vocab` tokens."""
    described = json.loads(Tokenizer.load("bundled").serialised())
    words, chance = described["model"]["vocab"], random.Random(SEED)
    while len(words) < vocab - 256:
        word = "".join(chance.choices(string.ascii_lowercase, k=chance.randrange(2, 9)))
        words.setdefault(chance.choice(("", "Ġ")) + word, len(words))
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    return Tokenizer(backend, special_tokens={"eos_token": "<|endoftext|>"})


async def measure(bench: Bench, load: Load, repeats: int) -> tuple[list[float], list[float]]:
    """Return tokens a second without and with the schema, in pairs of runs."""
    found: tuple[list[float], list[float]] = ([], [])
    async with bench.serving():
        for i in range(repeats + 1):
            for speeds, grammar in zip(found, (None, SCHEMA), strict=True):
                asked = load.make_requests(f"{grammar is not None}/{i}", bench.shape.vocab)
                asked = [msgspec.structs.replace(one, grammar=grammar) for one in asked]
                speeds.append(load.requests * load.output / await bench.serve(asked))
    return found[0][1:], found[1][1:]  # the first pair warms up


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, to try the script")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes in a pair of runs")
    options = parser.parse_args()
    check_tiny(parser, options)
    shape = replace(TINY, vocab=4608) if options.tiny else FULL
    tokenizer = wide_tokenizer(shape.vocab)
    quote = json.loads(tokenizer.serialised())["model"]["vocab"]['"']
    ends = {quote: math.log(shape.vocab / STRING_TOKENS)}
    load = Load(64, 16, 256, sampling=SamplingParams(temperature=1.0, logit_bias=ends))
    load = replace(load, requests=4, output=6) if options.tiny else load
    grammars = Grammars(lambda: tokenizer, shape.vocab)
    grammars.compiled(SCHEMA)
    bench = Bench(make_base(shape), shape, grammars=grammars)
    bench.capture()
    if options.profile:
        with cProfile.Profile() as profile:
            asyncio.run(measure(bench, load, 0))
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    plain, masked = asyncio.run(measure(bench, load, 1 if options.tiny else REPEATS))
    results = Results.of(
        options,
        "schema_cost.json",
        script="benchmarks.serving.schema_cost",
        hardware=hardware(shape),
        seed=SEED,
        settings=vars(shape),
    )
    costs = [1 - b / a for a, b in zip(plain, masked, strict=True)]
    about = {"tok_s": round(statistics.median(plain), 1), "tok_s_schema": round(statistics.median(masked), 1)}
    results.put(KEY, round(statistics.median(costs), 4), "fraction", Target(0.03, most=True), costs, about)


if __name__ == "__main__":
    main()
