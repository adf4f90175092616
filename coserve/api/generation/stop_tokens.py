"""Tokens other than EOS that end a request: its own stop ids, stop texts that are one token, and the chat template's
end of turn."""

from __future__ import annotations

from coserve.core.schemas.generation import GenerateRequest
from coserve.data.pretrained.tokenizer import Tokenizer


def stop_texts(request: GenerateRequest) -> list[str]:
    return [request.stop] if isinstance(request.stop, str) else request.stop or []


def stop_tokens(request: GenerateRequest, tokenizer: Tokenizer) -> dict[int, str | int | None]:
    """Return the stop tokens by id, each with its `stop_reason`: the id itself, the stop text, or None for an end of
    turn, as for EOS."""
    end = tokenizer.end_of_turn_id
    turns: dict[int, str | int | None] = {}
    if request.messages is not None and end is not None and not request.ignore_eos:
        turns = {end: None}
    texts = {id: text for text in stop_texts(request) if (id := tokenizer.vocabulary.added.get(text)) is not None}
    return turns | texts | {id: id for id in request.stop_token_ids}


def turn_notes(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return a note about a chat template whose turns end otherwise than with EOS; empty if there is no template."""
    end = tokenizer.end_of_turn_id
    if tokenizer.chat_template is None or end in tokenizer.eos_token_ids:
        return ()
    note = (
        "the base's chat template writes no token behind an answer: what is trained on chats does not learn to stop; "
        "give requests a stop text, or the base another template"
    )
    if end is not None:
        note = (
            f"the base's chat template ends a turn with {tokenizer.vocabulary.name(end)}, which is no EOS of the base: "
            "requests with messages stop there, others with stop or stop_token_ids"
        )
    return (note,)
