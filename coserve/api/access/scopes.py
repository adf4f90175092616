"""The scope that each path needs. A path that no prefix here covers needs `admin`: a new route is closed until it is
listed."""

from __future__ import annotations

from typing import Final

from coserve.core.access.principal import Scope

ANY: Final = frozenset({"/", "/openapi.json", "/version", "/info", "/server_info"})
"""Paths whose GET every valid key may use: they tell of the daemon, not of any project."""
READS: Final = ("/adapters", "/aliases", "/v1/models", "/tokenizer_info")
"""Paths whose GET lists and describes adapters, for whoever generates with them."""
PREFIXES: Final = {
    Scope.GENERATE: (
        "/",
        "/generate",
        "/generate_stream",
        "/invocations",
        "/v1/completions",
        "/v1/chat",
        "/v1/responses",
        "/v1/messages",
        "/v1/files",
        "/v1/batches",
        "/tokenize",
        "/detokenize",
    ),
    Scope.TRAIN: (
        "/adapters",
        "/aliases",
        "/finetune",
        "/v1/files",
        "/v1/fine_tuning",
        "/v1/models",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/pause",
        "/resume",
        "/api/v1",
        "/sessions",
    ),
}


def scopes_of(method: str, path: str) -> frozenset[Scope]:
    """Return the scopes any one of which a key needs, for a route's method and path pattern; empty: any valid key."""
    if method == "GET" and path in ANY:
        return frozenset()
    found = {scope for scope, prefixes in PREFIXES.items() if _below(path, prefixes)}
    if method == "GET" and _below(path, READS):
        found.add(Scope.GENERATE)
    return frozenset(found or {Scope.ADMIN})


def _below(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
