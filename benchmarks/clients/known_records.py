"""Hooks of Schemathesis: half of the names in random requests are of records that the daemon has, since a random one is
always unknown, and half of the empty prompts and corpora have content. Loaded by `SCHEMATHESIS_HOOKS`."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from random import Random
from typing import Any

import schemathesis

KNOWN_AS = {"continue_from": "adapter", "teacher": "adapter", "target": "adapter", "model_path": "path"}
"""Fields that name what another field names."""
CONTENT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the cat"}],
    "prompt": "the cat",
    "inputs": "the cat",
    "input": "the cat",
    "data": [{"prompt": "the cat", "completion": " sat"}],
}
"""What stands for a field's empty value."""
random, known = Random(1), defaultdict[str, list[str]](list)
for place, names in json.loads(os.environ.get("KNOWN_RECORDS", "{}")).items():
    known[place] += names


def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    """Put known names for half of the path's `id`s, and known names and content into half of the bodies."""
    collection = case.path.partition("/{id}")[0]
    if "id" in (case.path_parameters or {}) and random.random() < 0.5 and known[collection]:
        case.path_parameters["id"] = random.choice(known[collection])
    if not isinstance(case.body, dict):
        return
    if "max_output_tokens" in case.body and case.body["max_output_tokens"] is None:
        case.body["max_output_tokens"] = 2  # a response would fill the context
    if random.random() < 0.5:
        return
    for field, value in case.body.items():
        names = known[KNOWN_AS.get(str(field), str(field))]
        if names and (value is None or isinstance(value, str)):
            case.body[field] = random.choice([value, *names])
        elif field in CONTENT and value in (None, "", []):
            case.body[field] = CONTENT[field]
    if case.path == "/generate" and case.body.get("prompt"):
        case.body.pop("messages", None)  # it takes one of them


def after_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], response: schemathesis.Response
) -> None:
    """Remember the names in answers: an `id` as one of the path's collection, others by their field."""
    if not 200 <= response.status_code < 300 or "application/json" not in response.headers.get("content-type", [""])[0]:
        return
    answer = response.json()
    records = answer.get("data", [answer]) if isinstance(answer, dict) else []
    for record in (record for record in records if isinstance(record, dict)):
        for field, value in record.items():
            place = case.path if field == "id" else field
            if isinstance(value, str) and (field == "id" or field.endswith("_id") or field == "path"):
                known[place].append(value)


schemathesis.hook(before_call)
schemathesis.hook(after_call)
