"""Templates that need any time or memory end in a helper process, with a typed error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from coserve.core.errors import InvalidRequest
from coserve.data.offload.pool import HelperPool
from coserve.data.pretrained.sandbox import SECONDS
from tests.support import tasks
from tests.support.api_server import tokenizer
from tests.support.chat_templates import GPT_OSS
from tests.support.examples import in_turns, on_days, sample

ENDLESS = {
    "power": "{{ 9 ** 999999999 }}",
    "nested_loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "round": "{{ 5 | round(1000000000, 'floor') }}",
    "doubling_list": "{% set ns = namespace(x=['xxxxxxxx']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"  # noqa: E501
    "{{ ns.x }}",
    "doubling_number": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",  # noqa: E501
    "sum_of_lists": "{{ (['ab'] * 99999) | map('list') | sum(start=[]) | length }}",
    "strip": "{% set x = 'a' * 1000000 %}{{ ('b' * 1000000).strip(x ~ 'b') }}",
    "namespace_printing": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}"  # noqa: E501
    "{% endfor %}{{ ns.x }}{{ raise_exception('end') }}",
}
"""Each takes all the processor's time that it may have."""
LARGE = {
    "repeat": "{{ 'x' * 10**9 }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "format_percent": "{{ '%1000000000d' % 1 }}",
    "format_filter": "{{ '%1000000000d' | format(1) }}",
    "indent": "{{ 'x' | indent(1000000000, true) }}",
    "tojson_indent": "{{ [1] | tojson(indent=1000000000) }}",
    "doubling_concat": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",  # noqa: E501
    "doubling_block": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "replace_filter": "{% set x = 'x' * 100000 %}{{ x | replace('x', x) }}",
    "join_method": "{% set x = 'x' * 100000 %}{{ x.join(x) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "tojson_separators": "{{ range(9999) | list | tojson(separators=('x' * 1000000, ':')) }}",
}


@pytest.fixture
async def pool() -> AsyncIterator[HelperPool]:
    pool = HelperPool(tokenizer().state, 1)
    yield pool
    await pool.close()


@pytest.mark.parametrize("names", sample([("repeat",), tuple(LARGE)], ("repeat",)), ids=["one", "all"])
async def test_a_template_that_takes_memory_ends_with_a_typed_error(pool: HelperPool, names: Sequence[str]) -> None:
    """And leaves its process to the next one."""
    for name in names:
        await refused(pool, LARGE[name])


@pytest.mark.parametrize("source", in_turns(ENDLESS, days=len(ENDLESS)))
async def test_a_template_that_takes_time_ends_with_a_typed_error(pool: HelperPool, source: str) -> None:
    await refused(pool, source)


async def refused(pool: HelperPool, source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the base's chat template (exceeds|refuses)") as caught:
        await pool.run(tasks.render, source)
    assert caught.value.field == "messages", source
    assert await pool.run(tasks.render, "ok") == "ok", source


@on_days(2)
async def test_processor_time_is_counted_for_each_rendering(pool: HelperPool) -> None:
    """Not for the process, and not while it waits for a processor."""
    first = await pool.run(tasks.pid)
    for _ in range(2):
        assert await pool.run(tasks.compute) == SECONDS - 1
        assert await pool.run(tasks.render, GPT_OSS)
    assert await pool.run(tasks.pid) == first
