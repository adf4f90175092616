"""Keys of pages: equal exactly where base, salt, adapter version and all tokens up to the page's end are equal."""

from __future__ import annotations

import random
from itertools import product

import pytest

from coserve.core.types import AdapterRef
from coserve.memory.prefix import DIGEST_BYTES, PageKeys


def keys(
    tokens: list[int], pages: int, *, ref: AdapterRef | None = None, base: str = "b", salt: str = ""
) -> list[bytes]:
    return list(PageKeys(4, base=base, adapter=ref, salt=salt).first(pages, tokens))


def test_a_key_is_of_everything_up_to_the_pages_end() -> None:
    tokens = list(range(12))
    first = keys(tokens, 3)
    assert len(set(first)) == 3
    assert {len(key) for key in first} == {DIGEST_BYTES}
    assert keys([*tokens[:11], 99], 3)[:2] == first[:2]
    assert keys([*tokens[:11], 99], 3)[2] != first[2]
    assert not set(keys([99, *tokens[1:]], 3)) & set(first)
    assert not set(keys(tokens[4:], 2)) & set(first), "a page's place in the text is part of it"


def test_keys_grow_with_the_sequence_and_stay() -> None:
    own, tokens = PageKeys(4, base="b", adapter=None), list(range(4))
    first = list(own.first(1, tokens))
    tokens += range(4, 9)
    assert list(own.first(2, tokens)) == keys(tokens, 2)
    assert list(own.first(1, tokens)) == first
    assert list(own.first(0, tokens)) == []
    with pytest.raises(AssertionError, match="3 full pages"):
        own.first(3, tokens)


def test_nobody_shares_but_those_with_the_same_base_salt_and_adapter_version() -> None:
    """Also where names run into each other."""
    refs = [None, AdapterRef("", 1), AdapterRef("a", 1), AdapterRef("a", 2), AdapterRef("a", 11), AdapterRef("a1", 1)]
    refs += [AdapterRef("a\x00", 1), AdapterRef("1", 1), AdapterRef("None", 1)]
    names = ["", "a", "aa", "a1", "1", "None"]
    found = [keys([1, 2, 3, 4], 1, ref=ref, base=base, salt=salt)[0] for ref, base, salt in product(refs, names, names)]
    assert len(set(found)) == len(found) == 9 * 36


def test_tokens_do_not_run_into_each_other() -> None:
    chance = random.Random(0)
    texts = {tuple(chance.choice((0, 1, 11, 256, 65536, 1 << 24, 2**31)) for _ in range(4)) for _ in range(2000)}
    assert len({keys(list(text), 1)[0] for text in texts}) == len(texts) > 1000
