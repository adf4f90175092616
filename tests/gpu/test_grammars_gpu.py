"""Masks on a GPU, between CUDA graphs and one step ahead of the host."""

from __future__ import annotations

import msgspec
import pytest

from coserve.core.sampling import SamplingParams
from coserve.core.types import FinishReason
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.generate.grammars import Grammars
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase
from coserve.model.load import load_base
from tests.support.executors import graphs
from tests.support.generation import collect, request
from tests.support.grammars import ANY, follows, generator, requests

pytestmark = pytest.mark.gpu


def test_answers_follow_their_grammars_in_graphs() -> None:
    base, tokenizer = load_base("bundled", device="cuda", dtype="bfloat16"), Tokenizer.load("bundled")
    grammars, kv = Grammars(lambda: tokenizer, base.spec.vocab, pinned=True), KvCache.for_base(base, 2048, 16)
    gen = generator(base, kv, graphs(FusedBase(base), kv, max_running=8), grammars)
    ids = tokenizer.encode("Once upon a time")
    asked = requests(ids)
    found = collect(gen, asked)
    for message in asked[:-1]:
        tokens, finished = found[message.id]
        assert message.grammar is not None
        assert finished is FinishReason.STOP, message.id
        assert follows(tokenizer.decode(tokens), message.grammar)
    plain = request("r", tuple(ids), SamplingParams(max_tokens=16, temperature=0.0))
    free = collect(gen, [plain])
    assert collect(gen, [msgspec.structs.replace(plain, grammar=ANY)]) == free
