"""No input within the limits holds the API's event loop for more than 50 ms. Large and hostile ones come over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from coserve.core.limits import MAX_MESSAGES
from tests.support.examples import examples, in_turns
from tests.support.fake_engine import SITE
from tests.support.watched_server import OLD_JOB, Watched, watched_server

pytestmark = pytest.mark.slow
MOST = 50.0 if examples(100) == 100 else 240.0
"""Milliseconds of the process's CPU time between two heartbeats of its loop. `make test-long` is strict; the others, on
machines of any speed, see only what holds the loop for as long as decoding or reading such a body does."""
MIB = 1 << 20
TRIES = 12
"""What holds the loop by its nature does it each time; a busy machine's caches make some piece of work slow once."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_server(tmp_path_factory.mktemp("watched")) as server:
        yield server


def check(server: Watched, act: Callable[[], None]) -> None:
    """`act` holds the loop for at most `MOST`, in one of `TRIES`."""
    longest = float("inf")
    for _ in range(TRIES):
        server.ask("measure")
        act()
        longest = min(longest, server.ask("measure"))
        if longest < MOST:
            return
    pytest.fail(f"the loop stood for {longest:.0f} ms")


def ask(server: Watched, method: str, path: str, body: bytes = b"", kind: str = "text/plain") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request(method, path, body, {"Content-Type": kind})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def post(server: Watched, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
    return ask(server, "POST", path, body, kind)


def joined(head: bytes, item: bytes, size: int, tail: bytes) -> bytes:
    return head + b",".join([item] * (size // (len(item) + 1))) + tail


def corpus(*lines: bytes) -> bytes:
    """A multipart body with a corpus."""
    settings = b'--b\r\nContent-Disposition: form-data; name="settings"\r\n\r\n{"adapter": "poet"}\r\n'
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return settings + file + b"\n".join(lines) + b"\r\n--b--\r\n"


def adapter(header: bytes, config: bytes, name: str = "x", data: bytes = b"") -> bytes:
    """A multipart body with an adapter's files."""
    weights = len(header).to_bytes(8, "little") + header + data
    parts = [b'--b\r\nContent-Disposition: form-data; name="settings"\r\n\r\n' + json.dumps({"name": name}).encode()]
    for file, content in (("adapter_config.json", config), ("adapter_model.safetensors", weights)):
        parts.append(
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n' % file.encode() + content
        )
    return b"\r\n".join([*parts, b"--b--\r\n"])


def duplicates(size: int) -> bytes:
    names = [b'"%d":0' % number for number in range(size // 10)]
    return b"{" + b",".join([*names, names[-1]]) + b"}"


def spellings(count: int) -> dict[str, int]:
    """Patterns of one module's name, with other characters that stand for any."""
    ends = (
        "".join(letter if number >> place & 1 else "." for place, letter in enumerate(SITE))
        for number in range(1, count + 1)
    )
    return dict.fromkeys(ends, 4)


def job_of(**lora: object) -> bytes:
    return json.dumps({"adapter": "a", "data": [{"text": "the cat"}], "lora": lora}).encode()


BIG = 14 * MIB
DATUM = b"\x1a\x0a\x0a\x08\x0a\x06\x0a\x04\0\0\0\0"
"""In protobuf: one token, and nothing to learn."""
CALLS = (
    b'{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{}}]},'
    b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"dry"}]}'
)
PAIR = (
    b'{"role":"user","content":[{"type":"input_text","text":"a"}]},'
    b'{"role":"assistant","content":[{"type":"output_text","text":"b"}]}'
)
JSON_BODIES: dict[str, tuple[str, Callable[[], bytes], set[int]]] = {
    "2 MB text to tokens": ("/tokenize", lambda: b'{"prompt": "' + b"the cat sat " * (MIB // 6) + b'"}', {200}),
    "3 MB text to generate": ("/generate", lambda: b'{"prompt": "' + b"the cat sat " * (MIB // 4) + b'"}', {400}),
    "14 MB of text": ("/generate", lambda: b'{"prompt": "' + b"x" * BIG + b'"}', {400}),
    "14 MB of escapes": ("/v1/completions", lambda: b'{"prompt": "' + b"\\u4f60" * (BIG // 6) + b'"}', {400}),
    "5 MB of UTF-8 in TGI's shape": (
        "/generate",
        lambda: b'{"inputs": "' + "你".encode() * (5 * MIB // 3) + b'"}',
        {400, 422},
    ),
    "60,000 characters": ("/generate", lambda: b'{"prompt": "' + b"the cat sat " * 5000 + b'"}', {200}),
    "a million token ids": ("/detokenize", lambda: joined(b'{"tokens": [', b"77", 3 * MIB, b"]}"), {200}),
    "token ids to generate": ("/generate", lambda: joined(b'{"prompt": [', b"1000", BIG, b"]}"), {400}),
    "many prompts": ("/v1/completions", lambda: joined(b'{"prompt": [', b"[1,2,3]", 4 * MIB, b"]}"), {400}),
    "wide rows": ("/finetune", lambda: joined(b'{"adapter": "a", "data": [', b"{}", 2 * MIB, b"]}"), {422}),
    "rows of small lists": ("/finetune", lambda: joined(b'{"adapter":"a","data":[{"a":[', b"[]", BIG, b"]}]}"), {422}),
    "rows of keys": ("/finetune", lambda: b'{"adapter":"a","data":[' + duplicates(6 * MIB) + b"]}", {400}),
    "good rows": (
        "/finetune",
        lambda: joined(b'{"adapter":"a","data":[', b'{"text":"the cat"}', MIB, b"]}"),
        {202, 422},
    ),
    "deep JSON": ("/finetune", lambda: b'{"adapter":"a","data":[{"a":' + b"[" * 7 * MIB, {400}),
    "a refused field before 14 MB": ("/finetune", lambda: joined(b'{"adapter":5,"data":[', b"{}", BIG, b"]}"), {400}),
    "an unknown field of 14 MB": ("/generate", lambda: joined(b'{"x": [', b"{}", BIG, b"]}"), {400}),
    "a field that anything may be": (
        "/v1/completions",
        lambda: joined(b'{"prompt":"x","user":[', b"[]", 4 * MIB, b"]}"),
        {400},
    ),
    "1024 messages": (
        "/v1/chat/completions",
        lambda: joined(b'{"messages": [', b'{"role":"user","content":"' + b"the cat " * 512 + b'"}', 4 * MIB, b"]}"),
        {400},
    ),
    "half a million parts": (
        "/v1/chat/completions",
        lambda: (
            b'{"messages": ['
            + b",".join([joined(b'{"role":"user","content":[', b'{"type":"text","text":""}', 26 * 1000, b"]}")] * 500)
            + b"]}"
        ),
        {400},
    ),
    "as many of Anthropic's messages as a chat may have": (
        "/v1/messages",
        lambda: b'{"max_tokens": 1, "messages": [' + b",".join([CALLS] * (MAX_MESSAGES // 2)) + b"]}",
        {400},
    ),
    "as many items as a conversation may have to compact": (
        "/v1/responses/compact",
        lambda: (
            b'{"truncation": "auto", "max_output_tokens": 1, "input": [%s]}' % b",".join([PAIR] * (MAX_MESSAGES // 2))
        ),
        {400},
    ),
    "as many items as a conversation may have to store": (
        "/v1/responses",
        lambda: (
            b'{"truncation": "auto", "max_output_tokens": 1, "input": [%s]}' % b",".join([PAIR] * (MAX_MESSAGES // 2))
        ),
        {200},
    ),
    "a large import": ("/adapters", lambda: b'{"name": "' + b"x" * BIG + b'"}', {400}),
    "logit biases": (
        "/generate",
        lambda: b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(500_000)) + b"}}",
        {400},
    ),
    "8,000 spellings of a module": ("/finetune", lambda: job_of(rank_pattern=spellings(8000)), {400}),
    "1,024 spellings of a module": ("/finetune", lambda: job_of(rank_pattern=spellings(1024)), {202}),
    "100,000 targets": ("/finetune", lambda: job_of(targets=[f"q{number}" for number in range(100_000)]), {400}),
    "Tinker's numberless call": ("/api/v1/save_weights", lambda: joined(b'{"x": [', b'{"a":[]}', BIG, b"]}"), {422}),
    "a million of Tinker's datums": ("/api/v1/forward_backward", lambda: DATUM * (BIG // len(DATUM)), {404}),
    "stop texts": ("/generate", lambda: joined(b'{"prompt": "x", "stop": [', b'"aa"', BIG, b"]}"), {400}),
}
CORPORA: dict[str, tuple[Callable[[], bytes], set[int]]] = {
    "blank lines": (lambda: b"\n" * (4 * MIB), {400}),
    "blank lines behind a part": (lambda: corpus(b'{"text": "cat"}')[:-7] + b"\r\n--b" + b"\r\n" * MIB, {400}),
    "a row of 3 MB": (lambda: corpus(b'{"text": "' + b"the cat sat " * (MIB // 4) + b'"}'), {202}),
    "a field twice": (lambda: corpus(duplicates(2 * MIB)), {422}),
    "a row of small lists": (lambda: corpus(joined(b'{"text": [', b"[]", 8 * MIB, b"]}")), {422}),
    "20,000 rows of a word": (lambda: corpus(*[b'{"text": "cat"}'] * 20_000), {202}),
    "settings of 1 MB": (
        lambda: (
            b'--b\r\nContent-Disposition: form-data; name="settings"\r\n\r\n'
            + joined(b'{"adapter": "a", "data": [', b"{}", MIB - 100, b"]}")
            + b'\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
        ),
        {400},
    ),
}

LORA = b'{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}'
TENSORS = {
    f"base_model.model.{SITE}.lora_A.weight": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]},
    f"base_model.model.{SITE}.lora_B.weight": {"dtype": "F32", "shape": [8, 2], "data_offsets": [64, 128]},
}
IMPORTS: dict[str, tuple[Callable[[], bytes], int]] = {
    "a shape of a million numbers": (
        lambda: adapter(joined(b'{"a":{"dtype":"F32","shape":[', b"0", 3 * MIB, b'],"data_offsets":[0,0]}}'), LORA),
        422,
    ),
    "60,000 tensors": (
        lambda: adapter(
            b"{"
            + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(60_000))
            + b"}",
            LORA,
        ),
        422,
    ),
    "a config of small lists": (
        lambda: adapter(b"{}", joined(b'{"peft_type":"LORA","target_modules":[', b"[]", MIB - 100, b"]}")),
        422,
    ),
    "a config that excludes 200,000 modules": (
        lambda: adapter(
            json.dumps(TENSORS).encode(),
            LORA[:-1] + b', "exclude_modules": [' + b",".join([b'"q"'] * 200_000) + b', "q_proj"]}',
            data=bytes(128),
        ),
        422,
    ),
    "a good one with 3 MB of metadata": (
        lambda: adapter(
            json.dumps(TENSORS | {"__metadata__": {str(i): "x" for i in range(200_000)}}).encode(),
            LORA,
            "large",
            bytes(128),
        ),
        201,
    ),
}
CHAT = [{"role": "user", "content": "x"}]
DETAILS = {"details": True, "top_n_tokens": 5}
IDS = [300] * 12_000
STOPS = ["a" * 255 + "b", *(chr(100 + i) + "c" + "a" * 254 for i in range(15))]
ANSWERS: dict[str, tuple[str, dict[str, object]]] = {
    "1,024 scored completions": ("/v1/completions", {"prompt": ["x"] * 1024, "logprobs": 20}),
    "a long scored completion": ("/v1/completions", {"prompt": "x", "logprobs": 20, "max_tokens": 8000}),
    "1,024 completions": ("/v1/completions", {"prompt": ["x"] * 1024, "max_tokens": 128, "return_token_ids": True}),
    "a scored chat": (
        "/v1/chat/completions",
        {"messages": CHAT, "n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 512},
    ),
    "scored choices": ("/generate", {"prompt": "x", "n": 16, "logprobs": 20, "max_tokens": 512}),
    "TGI's best of 4": (
        "/generate",
        {"inputs": "x", "parameters": DETAILS | {"best_of": 4, "do_sample": True, "max_new_tokens": 2048}},
    ),
    "an echo": ("/v1/completions", {"prompt": [300] * 30_000, "echo": True, "max_tokens": 1}),
    "a scored echo": ("/v1/completions", {"prompt": IDS, "echo": True, "logprobs": 20, "max_tokens": 0}),
    "1,024 scored streams": ("/v1/completions", {"prompt": ["x"] * 1024, "logprobs": 20, "stream": True}),
    "a stream of 16 scored choices": (
        "/v1/chat/completions",
        {"messages": CHAT, "n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 256, "stream": True},
    ),
    "a stream of a scored prompt": (
        "/generate",
        {"prompt": IDS, "prompt_logprobs": 20, "max_tokens": 1, "stream": True},
    ),
    "TGI's stream": ("/generate_stream", {"inputs": "x", "parameters": DETAILS | {"max_new_tokens": 2048}}),
    "16 streams with 16 stop texts": (
        "/generate",
        {"prompt": "x", "n": 16, "max_tokens": 512, "stream": True, "stop": STOPS},
    ),
}
PAGES = [
    "/v1/models",
    "/adapters?limit=100",
    "/finetune?limit=100",
    f"/finetune/{OLD_JOB}/events",
    f"/v1/files/file-{OLD_JOB}/content",
    "/metrics",
    "/health",
]


def test_the_watchdog_sees_a_thread_that_holds_the_lock(server: Watched) -> None:
    server.ask("measure")
    assert server.ask("hold") > 2 * MOST


@pytest.mark.parametrize("name", in_turns(JSON_BODIES.keys(), always=("2 MB text to tokens", "deep JSON")))
def test_json(server: Watched, name: str) -> None:
    path, make, statuses = JSON_BODIES[name]
    body = make()
    assert len(body) <= 16 * MIB

    def act() -> None:
        status, answer = post(server, path, body)
        assert status in statuses, answer[:500]

    check(server, act)


@pytest.mark.parametrize("name", in_turns(CORPORA.keys(), always=("20,000 rows of a word",)))
def test_corpora(server: Watched, name: str) -> None:
    make, statuses = CORPORA[name]
    body = make()

    def act() -> None:
        status, answer = post(server, "/finetune", body, "multipart/form-data; boundary=b")
        assert status in statuses, answer[:500]

    check(server, act)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b"])
def test_chunks_of_one_byte(server: Watched, kind: str) -> None:
    def act() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as sock:
            head = f"POST /finetune HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"  # noqa: E501
            with suppress(ConnectionError):  # it may be refused before its end
                sock.sendall(head.encode() + b"1\r\n \r\n" * 300_000 + b"0\r\n\r\n")
            answer = sock.recv(1024)
        assert answer.startswith(b"HTTP/1.1 400 "), answer

    check(server, act)


@pytest.mark.parametrize("name", in_turns(IMPORTS.keys(), always=("60,000 tensors",)))
def test_imports(server: Watched, name: str) -> None:
    make, wanted = IMPORTS[name]
    body = make()

    def act() -> None:
        status, answer = post(server, "/adapters", body, "multipart/form-data; boundary=b")
        assert status == wanted, answer[:500]
        if status == 201:
            assert ask(server, "DELETE", "/adapters/large")[0] == 200

    check(server, act)


def test_a_job_that_goes_on_from_a_large_import(server: Watched) -> None:
    make, _ = IMPORTS["a good one with 3 MB of metadata"]
    status, answer = post(server, "/adapters", make(), "multipart/form-data; boundary=b")
    assert status == 201, answer[:500]
    asked = json.dumps({"adapter": "larger", "continue_from": "large", "data": [{"text": "the cat"}]}).encode()

    def act() -> None:
        status, answer = post(server, "/finetune", asked)
        assert status == 202, answer[:500]

    check(server, act)


@pytest.mark.parametrize(
    "name", in_turns(ANSWERS.keys(), always=("a long scored completion", "a stream of 16 scored choices"))
)
def test_answers(server: Watched, name: str) -> None:
    path, asked = ANSWERS[name]

    def act() -> None:
        status, answer = post(server, path, json.dumps(asked).encode())
        assert status == 200, answer[:500]
        if not asked.get("stream") and path != "/generate_stream":
            json.loads(answer)

    check(server, act)


@pytest.mark.slow
def test_four_scored_prompts_at_the_same_time(server: Watched) -> None:
    body = json.dumps({"prompt": IDS, "prompt_logprobs": 20, "max_tokens": 1}).encode()

    def act() -> None:
        with ThreadPoolExecutor(4) as threads:
            for status, answer in threads.map(lambda _: post(server, "/generate", body), range(4)):
                assert status == 200, answer[:500]
                assert len(json.loads(answer)["prompt_logprobs"]) == len(IDS)

    check(server, act)


@pytest.mark.slow
@pytest.mark.parametrize("path", in_turns(PAGES, always=("/v1/models", "/metrics")))
def test_pages_of_a_full_registry(server: Watched, path: str) -> None:
    def act() -> None:
        status, answer = ask(server, "GET", path)
        assert status == 200, answer[:500]

    check(server, act)


def test_references_to_all_items_of_a_long_conversation(server: Watched) -> None:
    given = [{"role": "user", "content": "a", "id": f"item-{place}"} for place in range(MAX_MESSAGES)]
    references = [{"type": "item_reference", "id": item["id"]} for item in given]
    for items in (given, references):
        body = json.dumps({"input": items, "truncation": "auto", "max_output_tokens": 1}).encode()

        def act(body: bytes = body) -> None:
            status, answer = post(server, "/v1/responses", body)
            assert status == 200, answer[:500]

        check(server, act)


def test_and_a_good_request_is_answered(server: Watched) -> None:
    status, answer = post(server, "/generate", b'{"prompt": "hello"}')
    assert (status, json.loads(answer)["choices"][0]["finish_reason"]) == (200, "length")
