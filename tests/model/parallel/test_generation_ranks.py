"""Generation on two ranks with layers that differ, or keep a recurrent state: the tokens of one process, whatever the
chunks and the preemptions, and from snapshots of states."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from coserve.model.load import load_base
from coserve.model.parallel.mesh import Mesh
from tests.support.examples import in_turns
from tests.support.executors import eager
from tests.support.families import tiny_family
from tests.support.generation import adapter, collect, prompt, request
from tests.support.lengths import OneMoreToken
from tests.support.ranks import Ranks
from tests.support.shelf import Shelf

REFS = (None, AdapterRef("a", 1), AdapterRef("b", 1))
SIZES = ((8192, 9), (68, 48))
"""Tokens of the cache, and of a step: the first chunks prompts, the second preempts."""
FAMILIES = (
    *("qwen3_5_text", "nemotron_h", "falcon_h1", "jamba", "olmo_hybrid"),
    *("gemma4", "llama4_text", "mimo_v2_flash", "jetmoe"),
)


def generate(mesh: Mesh | None, folder: str) -> list[tuple[dict[str, list[int]], int]]:
    """Each request's tokens and the number of preemptions, for each of `SIZES`."""
    base = load_base(folder, device="cpu", dtype="auto", mesh=mesh, strategy="slora")
    shelf = Shelf({ref: base.shard(adapter(base, i, 1 + i)) for i, ref in enumerate(REFS) if ref is not None})
    found = []
    for tokens, step_tokens in SIZES:
        kv = KvCache.for_base(base, tokens, 4, sequences=8)
        settings = {"max_running": 8, "step_tokens": step_tokens}
        gen = Generator(base, shelf.store(), kv, eager(base, kv), lengths=OneMoreToken(), **settings)
        refs = (None,) if tokens < 100 else REFS
        greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
        asked = [request(str(i), prompt(3 + 13 * i, i), greedy, refs[i % len(refs)]) for i in range(5)]
        said, again = ({id: tokens for id, (tokens, _) in collect(gen, asked).items()} for _ in range(2))
        assert again == said and (gen.scheduler.active.prefix_hits or tokens < 100)
        found.append((said, gen.scheduler.preemptions))
    return found


@pytest.mark.parametrize("family", in_turns(FAMILIES, FAMILIES[:1]))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_chunks_and_preemptions_give_the_tokens_of_one_process(two: Ranks, family: str, tmp_path: Path) -> None:
    """With an adapter whose rank both ranks divide among them, and one that each has whole."""
    tiny_family(family, max_position_embeddings=128).save_pretrained(tmp_path)
    expected = generate(None, str(tmp_path))
    assert expected[1][1] > 0, "too much memory to preempt"
    assert two.run(generate, str(tmp_path)) == [expected] * 2
