"""The store of responses: conversations in parts, and the room that projects share."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.api.openai.responses.answers import new_response
from coserve.api.openai.responses.schemas import Response, ResponseRequest, StoredItem
from coserve.api.openai.responses.store import MAX_REQUEST_BYTES, ResponseStore, decoded, stored_items
from coserve.core.access.principal import DAEMON, Principal, Scope, act_as, principal
from coserve.core.errors import InvalidRequest, NotFound

ITEMS = stored_items("word " * 1000)
"""5 KB."""


def add(store: ResponseStore, id: str, items: list[StoredItem] = ITEMS, *, previous: str | None = None) -> None:
    before = [] if previous is None else store.conversation(previous)
    asked = ResponseRequest(input="x", previous_response_id=previous)
    store.add(msgspec.structs.replace(new_response(asked, "m", 1), id=id, status="completed"), before, items)


def kept(store: ResponseStore, ids: str) -> str:
    """Those of the ids, one a character, whose response is stored."""
    return "".join(id for id in ids if has(store, id))


def has(store: ResponseStore, id: str) -> bool:
    try:
        return msgspec.json.decode(store.get(id), type=Response).id == id
    except NotFound:
        return False


def as_project(name: str) -> None:
    act_as(Principal(name, frozenset({Scope.GENERATE})))


def test_the_responses_used_last_are_kept() -> None:
    store = ResponseStore(most_bytes=20_000)  # room for three
    for id in "abc":
        add(store, id)
    assert store.conversation("a") == ITEMS
    add(store, "d")
    add(store, "e", stored_items("word " * 4000))  # too large
    assert kept(store, "abcde") == "acd"
    store.remove("a")
    add(store, "f")
    assert kept(store, "acdf") == "cdf"


def test_a_conversation_takes_memory_in_proportion_to_its_turns() -> None:
    store = ResponseStore(most_bytes=400_000)
    ids = [str(turn) for turn in range(50)]
    for id, previous in zip(ids, [None, *ids], strict=False):
        add(store, id, previous=previous)
    assert all(has(store, id) for id in ids)
    assert store.conversation("49") == ITEMS * 50


def test_items_of_deleted_responses_take_room_until_none_continues_them() -> None:
    store = ResponseStore(most_bytes=20_000)
    add(store, "a")
    add(store, "b", previous="a")
    store.remove("a")
    add(store, "c")
    assert kept(store, "abc") == "bc" and store.conversation("b") == ITEMS * 2
    store.remove("b")
    for id in "de":
        add(store, id)
    assert kept(store, "cde") == "cde"


def test_items_are_found_by_their_ids_while_a_response_has_them(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: act_as(DAEMON))
    store, (item,) = ResponseStore(), stored_items("hello")
    as_project("mine")
    add(store, "a", [item])
    add(store, "b", previous="a")
    add(store, "c", [item])  # sent again
    store.remove("a")
    assert store.items({0: item.id}) == [item]
    as_project("other")
    with pytest.raises(NotFound, match="no item"):
        store.items({0: item.id})
    as_project("mine")
    store.remove("c")
    assert store.items({0: item.id}) == [item], "of the conversation that goes on"
    store.remove("b")
    with pytest.raises(NotFound, match="no item"):
        store.items({0: item.id})


def test_a_request_reads_a_few_megabytes_of_stored_items() -> None:
    store, (large,) = ResponseStore(), stored_items("x" * (MAX_REQUEST_BYTES // 3))
    add(store, "a", [large])
    add(store, "b", [large], previous="a")
    assert store.items({0: large.id, 2: large.id}) == store.conversation("b") == [large, large]
    with pytest.raises(InvalidRequest, match="bytes of stored items") as refused:
        store.items(dict.fromkeys(range(1000), large.id))
    assert refused.value.field == "input[2].id"
    add(store, "c", [large], previous="b")
    with pytest.raises(InvalidRequest, match="bytes of stored items") as refused:
        store.conversation("c")
    assert refused.value.field == "previous_response_id" and len(store.inputs("c")) == 3


def test_a_response_whose_parent_was_dropped_meanwhile_has_its_items() -> None:
    store = ResponseStore(most_bytes=20_000)
    add(store, "a")
    before = store.conversation("a")
    store.remove("a")
    asked = ResponseRequest(input="x", previous_response_id="a")
    store.add(msgspec.structs.replace(new_response(asked, "m", 1), id="b"), before, ITEMS)
    assert store.conversation("b") == decoded(store.inputs("b")) == ITEMS * 2


def test_a_project_keeps_its_part_whatever_others_store(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: act_as(DAEMON))
    store = ResponseStore(most_bytes=36_000)  # room for six
    as_project("small")
    for id in "ab":
        add(store, id)
    as_project("large")
    for number in range(20):
        add(store, str(number))
    assert [id for id in map(str, range(20)) if has(store, id)] == ["16", "17", "18", "19"]
    assert kept(store, "ab") == ""
    as_project("small")
    assert kept(store, "ab") == "ab"
    for id in "cde":  # its part is half
        add(store, id)
    assert kept(store, "abcde") == "cde"
    act_as(DAEMON)
    assert kept(store, "cde") == "cde" and has(store, "19")


STEP = st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 20), st.sampled_from("pq"), st.booleans())


@given(st.lists(STEP, max_size=40))
def test_conversations_are_those_of_whole_copies(steps: list[tuple[str, int, str, bool]]) -> None:
    """Also those that an administrator continues, and those whose earlier responses are deleted."""
    store, copies, owners = ResponseStore(), dict[str, list[StoredItem]](), dict[str, str]()
    try:
        for number, (step, place, project, admin) in enumerate(steps):
            act_as(Principal(project, frozenset({Scope.ADMIN if admin else Scope.GENERATE})))
            seen = [id for id in copies if principal().sees(owners[id])]
            chosen = seen[place] if place < len(seen) else None
            if step == "add":
                items, id = stored_items(f"{number}"), str(number)
                add(store, id, items, previous=chosen)
                copies[id], owners[id] = copies.get(chosen or "", []) + items, project
            elif chosen is not None:
                store.remove(chosen)
                del copies[chosen]
        act_as(DAEMON)
        for id, items in copies.items():
            assert store.conversation(id) == decoded(store.inputs(id)) == items
    finally:
        act_as(DAEMON)
