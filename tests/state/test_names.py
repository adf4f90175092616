"""Aliases, labels, pins and uses in the registry."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from coserve.core.errors import AdapterBusy, AdapterNotFound, NameTaken
from coserve.core.types import AdapterRef
from coserve.state.registry.adapters import HALF_LIFE
from coserve.state.registry.records import AdapterRecord, AliasRecord, Labels
from coserve.state.registry.registry import Registry
from tests.support.records import make_adapter

ONE, TWO, OTHER = AdapterRef("a", 1), AdapterRef("a", 2), AdapterRef("b", 1)


def record(ref: AdapterRef) -> AdapterRecord:
    return make_adapter(ref.id, ref.version, base_fingerprint="f", base_name="base", created_at=0.0, bytes=100)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Registry:
    found = Registry(tmp_path / "registry.sqlite3", clock)
    for ref in (ONE, TWO, OTHER):
        found.add_adapter(record(found.reserve_version(ref.id)))
    return found


def test_an_alias_means_a_version_and_a_share_of_requests_gets_its_canary(registry: Registry) -> None:
    registry.set_alias(AliasRecord(name="prod", target=ONE, updated_at=0.0, canary=TWO, weight=0.2))
    got = Counter(registry.resolve("prod", None, f"gen-{i}").ref for i in range(2000))
    assert 0.15 < got[TWO] / 2000 < 0.25 and got[ONE] + got[TWO] == 2000
    assert len({registry.resolve("prod", None, "gen-1").ref for _ in range(5)}) == 1
    registry.set_alias(AliasRecord(name="prod", target=OTHER, updated_at=0.0))
    assert registry.resolve("prod", None, "gen-1").ref == OTHER
    with pytest.raises(AdapterNotFound):
        registry.resolve("prod", 1, "")
    registry.delete_alias("prod")
    with pytest.raises(AdapterNotFound):
        registry.resolve("prod", None, "")


def test_a_name_is_an_alias_or_an_adapter(registry: Registry) -> None:
    with pytest.raises(NameTaken, match="is, or was, an adapter"):
        registry.set_alias(AliasRecord(name="b", target=ONE, updated_at=0.0))
    registry.set_alias(AliasRecord(name="prod", target=ONE, updated_at=0.0))
    with pytest.raises(NameTaken, match="by an alias"):
        registry.reserve_version("prod")
    with pytest.raises(AdapterNotFound):
        registry.set_alias(AliasRecord(name="next", target=AdapterRef("a", 9), updated_at=0.0))


def test_what_an_alias_means_is_not_deleted(registry: Registry) -> None:
    registry.set_alias(AliasRecord(name="prod", target=ONE, updated_at=0.0, canary=OTHER, weight=0.5))
    for delete in (
        lambda: registry.delete_version(ONE),
        lambda: registry.delete_adapter("a"),
        lambda: registry.delete_adapter("b"),
    ):
        with pytest.raises(AdapterBusy, match="in use by alias prod"):
            delete()
    registry.delete_version(TWO)


def test_a_time_to_live_that_was_changed_meanwhile_deletes_nothing(registry: Registry) -> None:
    registry.set_labels("b", Labels(expires_at=3.0))
    assert registry.next_expiry() == ("b", 3.0)
    for later in (9.0, None):
        registry.set_labels("b", Labels(expires_at=later))
        assert registry.delete_expired("b", 3.0) == []
    registry.set_labels("b", Labels(expires_at=3.0))
    assert registry.delete_expired("b", 3.0) == [OTHER]


def test_uses_of_a_deleted_version_are_not_kept(registry: Registry) -> None:
    """They are counted some seconds after the request, and the version may be gone by then."""
    registry.delete_version(ONE)
    registry.count_uses({ONE: 8, OTHER: 1})
    assert registry.most_used(9) == [OTHER]


def test_labels_pins_and_uses_go_with_what_they_are_of(registry: Registry, clock: Clock) -> None:
    registry.set_labels("a", Labels(tags=("eu",), expires_at=5.0))
    registry.set_labels("b", Labels(expires_at=3.0))
    for ref in (ONE, TWO, TWO):
        registry.set_pinned(ref, pinned=True)
    registry.count_uses({ONE: 8, OTHER: 1})
    clock.now = 4 * HALF_LIFE
    registry.count_uses({OTHER: 1})
    assert registry.most_used(9) == [OTHER, ONE], "what was used long ago counts less"
    assert registry.next_expiry() == ("b", 3.0) and registry.pins() == {ONE, TWO}
    registry.delete_version(ONE)
    registry.delete_adapter("b")
    assert registry.pins() == {TWO} and registry.most_used(9) == [] and registry.next_expiry() == ("a", 5.0)
    assert registry.labels("a").tags == ("eu",) and registry.labels("b") == Labels()
    registry.delete_version(TWO)
    assert registry.labels("a") == Labels() and registry.next_expiry() is None
