"""`coserve adapters`: what it asks for, and what it prints."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from coserve.cli import adapters, common
from coserve.cli.app import app
from coserve.core.schemas.adapters import Adapter, AdapterList, ConvertedAdapter, DeletedAdapter
from tests.support.records import make_adapter_info

ADAPTER = make_adapter_info("poet-bd4", rank=32, source="convert:poet@2", bytes=1 << 20, bd_blocks=4)


def test_a_conversion_prints_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def convert(*args: object, **options: object) -> ConvertedAdapter:
        asked.append((args, options))
        return ConvertedAdapter(
            adapter=ADAPTER,
            rank=32,
            error=0.0412,
            site_errors={"q": 0.0412},
            max_error=0.1,
            smallest_rank=24,
            errors={16: 0.25, 32: 0.0412},
        )

    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(convert_adapter=convert)))
    command = ["adapters", "convert", "poet@2", "--bd-blocks", "4", "--rank", "32", "--max-error", "0.1"]
    result = CliRunner().invoke(app, command)
    assert asked == [(("poet@2", 4), {"rank": 32, "max_error": 0.1, "name": None})]
    assert result.output.splitlines() == [
        "poet-bd4@1  rank 32 in 4 blocks  1.0 MiB  convert:poet@2",
        "error 0.0412; within 0.1 from rank 24 on",
        "rank       16      32",
        "error   0.250   0.041",
    ]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The wall clock stands at this time."""
    found = time.time()
    monkeypatch.setattr(time, "time", lambda: found)
    return found


def test_what_was_set_is_printed(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    kept = msgspec.structs.replace(ADAPTER, tags=["a", "b"], pinned=True, expires_at=now + 7210)
    asked: list[dict[str, object]] = []

    def update_adapter(_: str, **given: object) -> Adapter:
        asked.append(given)
        return kept

    daemon = SimpleNamespace(update_adapter=update_adapter)
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(daemon))
    shown = CliRunner().invoke(app, ["adapters", "set", "poet-bd4", "--tag", "a", "--tag", "b"]).output
    assert shown.endswith("convert:poet@2  tags a, b  pinned  deleted in 2h\n")
    for text, seconds in {"2h": 7200, "90.5": 90.5, "0": 0}.items():
        assert CliRunner().invoke(app, ["adapters", "set", "poet-bd4", "--ttl", text]).exit_code == 0
        assert asked[-1]["ttl"] == seconds
    for nothing in ((), ("--tag", "a", "--clear-tags"), ("--ttl", "soon")):
        assert CliRunner().invoke(app, ["adapters", "set", "poet-bd4", *nothing]).exit_code == 2


@pytest.mark.parametrize(
    ("command", "shown"), [("finetune", "None: `2 * r`"), ("adapters convert", "NAME-bdN; NAME-lora for one block")]
)
def test_help_shows_defaults_that_the_daemon_chooses(command: str, shown: str) -> None:
    output = CliRunner().invoke(app, [*command.split(), "--help"]).output
    assert "".join(shown.split()) in "".join(output.split()), "wherever lines break"


def test_a_list_has_columns_with_headers(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    plain = msgspec.structs.replace(
        ADAPTER, id="po", version=2, newest=3, ref="po@2", rank=8, bd_blocks=1, source="import", created_at=now
    )
    small = msgspec.structs.replace(plain, bytes=46_000)
    kept = msgspec.structs.replace(plain, aliases=["prod"], tags=["a", "b"], pinned=True, expires_at=now + 7210)
    listed = AdapterList(data=[small, ADAPTER, kept], has_more=False)
    client = SimpleNamespace(adapters=lambda **_: listed, health=lambda: SimpleNamespace(status="ready"))
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(client))
    first, second, third, fourth = CliRunner().invoke(app, ["adapters", "list"]).output.splitlines()
    assert first.split() == ["ADAPTER", "RANK", "SIZE", "AGE", "SOURCE", "NEWER", "ALIASES", "TAGS", "KEPT"]
    assert second.split() == ["po@2", "8", "45", "KiB", "0s", "import", "po@3"]
    assert third.startswith("poet-bd4@1  32 in 4 blocks  1.0 MiB  ") and third.endswith("  convert:poet@2")
    assert fourth.split()[6:] == ["po@3", "prod", "a,", "b", "pinned,", "deleted", "in", "2h"]
    assert first.index("SOURCE") == second.index("import") == third.index("convert:")
    assert CliRunner().invoke(app, ["adapters", "list", "--json"]).output.count("\n") == 3


def test_a_cartridge_has_tokens_and_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = make_adapter_info("prefix", rank=128, cartridge=True)
    both = make_adapter_info("both", rank=4, prefix_tokens=64)
    listed = AdapterList(data=[prefix, both], has_more=False)
    client = SimpleNamespace(
        adapters=lambda **_: listed,
        health=lambda: SimpleNamespace(status="ready"),
        prefetch_adapter={"prefix": prefix, "both": both}.__getitem__,
    )
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(client))
    headers, *rows = CliRunner().invoke(app, ["adapters", "list"]).output.splitlines()
    column = headers.index("RANK")
    assert [row[column:].split("  ")[0] for row in rows] == ["128 tokens", "4 + 64 tokens"]
    shown = CliRunner().invoke(app, ["adapters", "prefetch", "prefix"]).output
    assert shown.startswith("prefix@1  cartridge of 128 tokens  ")
    shown = CliRunner().invoke(app, ["adapters", "prefetch", "both"]).output
    assert shown.startswith("both@1  rank 4 + 64 tokens  ")


def test_a_list_asks_for_what_was_given_and_names_it_for_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[dict[str, object]]()

    def listed(**query: object) -> AdapterList:
        asked.append(query)
        return AdapterList(data=[ADAPTER], has_more=True)

    client = SimpleNamespace(adapters=listed, health=lambda: SimpleNamespace(status="ready"))
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(client))
    given = ["--base", "my base", "--not-resident"]
    result = CliRunner().invoke(app, ["adapters", "list", *given])
    assert asked[0]["base"] == "my base" and asked[0]["resident"] is False
    more = "adapters list --base 'my base' --not-resident --limit 20 --after poet-bd4"
    assert result.stderr == f"there are more: coserve {more}\n"


def test_an_adapter_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(prefetch_adapter={"po": ADAPTER}.__getitem__)
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(client))
    assert CliRunner().invoke(app, ["adapters", "prefetch", "po"]).output.startswith("poet-bd4@1  rank 32")


def test_a_deletion_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = DeletedAdapter(id="po", versions=[1, 3], current_ref="po@2")
    client = SimpleNamespace(delete_adapter=lambda _: gone)
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(client))
    assert CliRunner().invoke(app, ["adapters", "delete", "po@1"]).output == "deleted po@1, po@3\npo now means po@2\n"


@pytest.mark.parametrize(
    ("arguments", "answer", "status", "deletes"),
    [
        (["po"], None, 2, False),
        (["po", "--yes"], None, 0, True),
        (["po@1"], None, 0, True),
        (["po"], "y\n", 0, True),
        (["po"], "n\n", 1, False),
        (["po"], "\n", 1, False),
    ],
)
def test_all_versions_go_after_a_question(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], answer: str | None, status: int, deletes: bool
) -> None:
    """`answer`: of who sits at the terminal; None: nobody does."""
    deleted: list[str] = []

    def delete(name: str) -> DeletedAdapter:
        deleted.append(name)
        return DeletedAdapter(id="po", versions=[1, 2])

    known = msgspec.structs.replace(ADAPTER, id="po", versions=[1, 2])
    client = SimpleNamespace(delete_adapter=delete, adapter=lambda _: known)
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(client))
    monkeypatch.setattr(adapters, "asks", lambda: answer is not None)
    result = CliRunner().invoke(app, ["adapters", "delete", *arguments], input=answer)
    assert result.exit_code == status, result.output
    assert deleted == ([arguments[0]] if deletes else [])
    if arguments == ["po"]:
        assert "all 2 versions of po" in " ".join(result.output.replace("│", "").split())


GONE = DeletedAdapter(id="poet-bd4", versions=[1])


@pytest.mark.parametrize(
    ("command", "call", "answer"),
    [
        (("show", "poet-bd4"), "adapter", ADAPTER),
        (("import", "poet-bd4", "folder"), "import_adapter", ADAPTER),
        (("rollback", "poet-bd4", "1"), "rollback_adapter", ADAPTER),
        (("delete", "poet-bd4@1"), "delete_adapter", GONE),
    ],
)
def test_json_is_the_answer_on_one_line(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], call: str, answer: Adapter | DeletedAdapter
) -> None:
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(**{call: lambda *_: answer})))
    result = CliRunner().invoke(app, ["adapters", *command, "--json"])
    assert (result.exit_code, result.output) == (0, msgspec.json.encode(answer).decode() + "\n")
