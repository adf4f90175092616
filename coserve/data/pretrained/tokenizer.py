"""Text to token ids and back, for the API process. No torch, except for a hub tokenizer without `tokenizer.json`."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from jinja2 import TemplateError

from coserve.core.errors import InvalidRequest, UnsupportedBase
from coserve.data.pretrained.chat import (
    LOST_CALLS,
    ChatTemplate,
    Limits,
    Message,
    choose_template,
    only_calls,
    refuse_lost_parts,
)
from coserve.data.pretrained.gguf_tokenizer import read_tokenizer
from coserve.data.pretrained.source import CODE, base_files
from coserve.data.pretrained.tokenizer_code import backend_of_code
from coserve.data.pretrained.vocabulary import Vocabulary

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
_CODE_FILES = ("*.py", "*.model", "*.tiktoken")
"""Further files of a tokenizer that is Python code."""
_SAMPLE = "Hello, world 1"
_ADVICE = (
    "put its tokenizer.json beside config.json "
    "(AutoTokenizer.from_pretrained(<the model it comes from>).save_pretrained(<the folder>) writes one)"
)
_MAX_HELD_TOKENS = 16
"""Most tokens that the detokenizer holds back. Bytes that never form a character become U+FFFD."""
SHORT = 2048
"""Most characters to tokenise in the calling thread, without the threads of `tokenizers`."""


class _TokenizerState(msgspec.Struct, frozen=True):
    backend: str
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


class Tokenizer:
    """One base's tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        limits: Limits = nullcontext,
    ) -> None:
        """`special_tokens`: by role (`bos_token`, `eos_token`, ...). `eos_token_ids`: further ids that end a
        generation. `limits`: as for `ChatTemplate`."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.prepended, self._appended = _added_around(backend)
        """Number of special tokens that `encode` puts before a text."""
        self.bos_token_id = self._id(special_tokens.get("bos_token"))
        self.eos_token_id = self._id(special_tokens.get("eos_token"))
        first = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys(first + eos_token_ids))
        """Ids that end a generation. Training appends the first."""
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens, self.chat_template = special_tokens, chat_template
        self.vocabulary = Vocabulary(backend)
        self._chat: ChatTemplate | None = None
        if chat_template is not None:
            self._chat = ChatTemplate(chat_template, special_tokens, self.vocabulary.added, limits)
        self.end_of_turn_id: int | None = None
        """Token with which the chat template ends an assistant turn. None: the template writes none, or
        `find_end_of_turn` was not called yet."""

    def with_chat_template(self, path: Path) -> Tokenizer:
        """Return this tokenizer with the template in a file, in place of the base's own. Raises `UnsupportedBase`."""
        source = _template(path, "chat_template")
        try:
            ChatTemplate(source, self.special_tokens).check()
        except TemplateError as error:
            raise UnsupportedBase(f"chat_template: {path}: {error}") from error
        return Tokenizer(self._backend, self.special_tokens, self.eos_token_ids, source)

    def find_end_of_turn(self) -> int | None:
        """Return the value for `end_of_turn_id`; renders a chat."""
        return None if self._chat is None else self._id(self._chat.end_of_turn)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    @classmethod
    def load(cls, source: str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Load a base's tokenizer: "bundled", a folder, a hub name or a GGUF file. Raises `UnsupportedBase`."""
        path = base_files(source, (*_FILES, *_CODE_FILES) if trust_remote_code else _FILES)
        if path.is_file():
            return cls(*read_tokenizer(path))
        return cls.from_folder(path, trust_remote_code=trust_remote_code)

    @classmethod
    def from_folder(cls, folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Read `tokenizer.json` and the folder's configs. `trust_remote_code`: without `tokenizer.json`, run the
        folder's own tokenizer code, if it brings some. Raises `UnsupportedBase`."""
        config = _read(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(_read(folder / "special_tokens_map.json") | config)
        backend = _backend(folder, config.get(CODE) or _read(folder / "config.json").get(CODE), trust_remote_code)
        _add_bos(backend, config, special_tokens)
        template = choose_template(config.get("chat_template"))
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            template = _template(template_file, "model")
        ends = [_read(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
        eos_token_ids = [id for end in ends for id in (end if isinstance(end, list) else [end]) if isinstance(id, int)]
        found = cls(backend, special_tokens=special_tokens, eos_token_ids=tuple(eos_token_ids), chat_template=template)
        if not found.decode(found.encode(_SAMPLE)):  # transformers loads a folder without a vocabulary, too
            raise UnsupportedBase(f"the base's tokenizer knows no words: {_ADVICE}")
        return found

    def serialised(self) -> str:
        """Return the content of a `tokenizer.json`."""
        return self._backend.to_str()

    def state(self) -> bytes:
        """Return the tokenizer as bytes, for `from_state` in another process."""
        return msgspec.msgpack.encode(
            _TokenizerState(self.serialised(), self.special_tokens, self.eos_token_ids, self.chat_template)
        )

    @classmethod
    def from_state(cls, state: bytes, limits: Limits = nullcontext) -> Tokenizer:
        found = msgspec.msgpack.decode(state, type=_TokenizerState)
        backend = tokenizers.Tokenizer.from_str(found.backend)
        return cls(backend, found.special_tokens, found.eos_token_ids, found.chat_template, limits)

    def _encode(self, text: str, *, add_special: bool) -> tokenizers.Encoding:
        """Encode a text, with offsets. `Tokenizer.encode` holds the GIL, `encode_batch` does not."""
        if len(text) <= SHORT:
            return self._backend.encode(text, add_special_tokens=add_special)
        return self._backend.encode_batch([text], add_special_tokens=add_special)[0]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return token ids. `add_special` adds the special tokens that the base expects before a text, such as BOS.

        Special tokens after the text, such as EOS, are left out, since generation continues the text.
        """
        ids: list[int] = self._encode(text, add_special=add_special).ids
        return ids[: len(ids) - self._appended] if add_special else ids

    def encode_continuation(self, text: str) -> list[int]:
        """Return token ids of a text that continues another one: without the space that some tokenizers prepend."""
        plain = self._encode(text, add_special=False)
        if not plain.tokens or not plain.tokens[0].startswith("▁") or text.startswith("▁"):
            return list(plain.ids)
        # No space is prepended after a line break, so encode one first. Its own tokens are removed.
        after = self._encode("\n" + text, add_special=False)
        if any(start < 1 < end for start, end in after.offsets):
            return list(plain.ids)
        return [id for id, (start, _) in zip(after.ids, after.offsets, strict=True) if start >= 1]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        options: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[int]:
        """Return token ids of a chat by the base's template, which does not see the messages' weights. Raises
        `InvalidRequest` (no template, or it refuses)."""
        text = self._template().render(
            [_without(message, "weight") for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
            tools=tools,
            options=options,
        )
        return self.encode(text, add_special=False)

    def encode_whole_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return token ids of a chat whose tokens are all learned, so the assistant's spans are not needed.

        Raises `InvalidRequest` as `ChatTemplate.render` does, and, as `encode_chat_for_training` does, for
        reasoning and tool calls that the template leaves out.
        """
        plain = [_without(message, "weight") for message in messages]
        render = partial(self._template().render, add_generation_prompt=False, tools=tools, options=options)
        text = render(plain)
        for message in messages:
            if message.get("weight") != 0:
                refuse_lost_parts(_without(message, "tool_calls"), text)
        if any(only_calls(message) and message.get("weight") != 0 for message in messages):
            silent = [_without(message, "tool_calls") for message in plain]
            if render(silent) == text:
                raise InvalidRequest(LOST_CALLS, field="messages")
        return self.encode(text, add_special=False)

    def encode_chat_for_training(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        options: Mapping[str, object] | None = None,
        *,
        most: int | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return token ids of a chat, and which of them to learn: assistant turns with their end-of-turn token.

        `most`: which of the first so many tokens to learn is all that is asked; that of later ones is undefined.
        Messages with `weight` 0 are not learned. Tokens that are only partly in an assistant turn are learned if the
        template marks the turns, as in transformers. Raises `InvalidRequest` as `ChatTemplate.render_for_training` and
        `refuse_lost_parts` do, and for an end of turn that is not a token of its own.
        """
        answers = [i for i, one in enumerate(messages) if one.get("role") == "assistant" and one.get("weight") != 0]
        plain = [_without(message, "weight") for message in messages]
        encode = cache(partial(self._encode, add_special=False))

        def kept(text: str) -> int:
            offsets = encode(text).offsets
            return len(text) if most is None or most >= len(offsets) else int(offsets[most][1])

        text, learned, marked = self._template().render_for_training(plain, tools, answers, options, kept)
        rendered = [text[slice(*span)] for span in learned]
        if marked:  # an answer may have no block, or several
            rendered = ["".join(rendered)] * len(answers)
        for index, own in zip(answers, rendered, strict=False):
            refuse_lost_parts(messages[index], own)
        encoding = encode(text)
        ids = list(encoding.ids)
        places = self.vocabulary.places(ids, encoding.offsets, text)
        starts, ends = [start for start, _ in places], [end for _, end in places]
        learn = [False] * len(ids)
        for span in learned:
            first, last = bisect_right(ends, span[0]), bisect_left(starts, span[1])
            if not marked:
                first, last = max(first, bisect_left(starts, span[0])), min(last, bisect_right(ends, span[1]))
            learn[first:last] = [True] * (last - first)
            closing = self._template().last_special(text, span)
            name = "" if closing is None else text[slice(*closing)]
            if self._id(name) is not None and closing not in places[first:last]:
                raise InvalidRequest(
                    f"expected the end of turn {name!r} to be a token of its own: the tokenizer splits it, or joins "
                    "it with its neighbours, so that it would not be learned",
                    field="messages",
                )
        return ids, learn

    def _template(self) -> ChatTemplate:
        if self._chat is None:
            raise InvalidRequest(
                "the base has no chat template; send a prompt instead of messages, or give the daemon a template "
                "(--chat-template)",
                field="messages",
            )
        return self._chat


class Detokenizer:
    """Incremental detokenizer. The texts of all `push` calls and of `flush`, joined, equal `decode`.

    No text ends inside a character. `prompt`: the last tokens before the sequence, since some tokenizers drop the space
    before the first word.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids = list(prompt[-8:])
        self._given = len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)

    def push(self, ids: Iterable[int]) -> str:
        """Return the new text; empty while the last character is incomplete."""
        parts = []
        for id in ids:
            self._ids.append(id)
            parts.append(self._advance(force=len(self._ids) - self._given >= _MAX_HELD_TOKENS))
        return "".join(parts)

    def flush(self) -> str:
        """Return the text held back, at the end of the sequence."""
        return self._advance(force=True)

    def _advance(self, *, force: bool) -> str:
        before, text = self._decode(self._ids[: self._given]), self._decode(self._ids)
        if not force and (len(text) <= len(before) or text.endswith("\N{REPLACEMENT CHARACTER}")):
            return ""
        # The tokens just decoded are the context of the next ones; earlier ones are dropped. Tokens without a text are
        # dropped too: there may be any number of them in a row, and all of `_ids` is decoded at each push.
        self._ids = self._ids[self._given :] if len(text) > len(before) else self._ids[: self._given]
        self._given = len(self._ids)
        return text[len(before) :]


def _without(message: Message, field: str) -> Message:
    return {key: value for key, value in message.items() if key != field}


def _added_around(backend: tokenizers.Tokenizer) -> tuple[int, int]:
    """Count the special tokens that the post-processor puts before and after a text."""
    plain, full = (backend.encode("a", add_special_tokens=special) for special in (False, True))
    if len(full.ids) == len(plain.ids):
        return 0, 0
    before, behind = (
        sum(1 for _ in takewhile(bool, masks)) for masks in (full.special_tokens_mask, full.special_tokens_mask[::-1])
    )
    return before, behind


def _template(path: Path, setting: str) -> str:
    """Read a chat template. Raises `UnsupportedBase`, which names the setting."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnsupportedBase(f"{setting}: cannot read {path}: {reason}") from error


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(
            content, ensure_ascii=False
        ).encode()  # raises for half of a surrogate pair, which cannot be sent to a helper process
    except (UnicodeError, json.JSONDecodeError) as error:
        raise UnsupportedBase(f"{path.name} of the base is not JSON in UTF-8") from error
    if not isinstance(content, dict):
        raise UnsupportedBase(f"{path.name} of the base: expected an object, got {type(content).__name__}")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` etc. by role. Each is a text or `{"content": text}`."""
    tokens = {}
    for role, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(content, str):
            tokens[role] = content
    return tokens


def _backend(folder: Path, code: object, trust_remote_code: bool) -> tokenizers.Tokenizer:
    """`code`: the classes that the folder's files bring, if any."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # `tokenizers` raises bare `Exception` for a bad file
            raise UnsupportedBase(f"tokenizer.json of the base is not valid: {error}") from error
    named = code.get("AutoTokenizer") if isinstance(code, dict) else code
    slow_and_fast = named if isinstance(named, list) else [named]
    reference = next((str(one) for one in reversed(slow_and_fast) if one), None)
    if reference and not trust_remote_code:
        raise UnsupportedBase(
            f"the base's tokenizer is Python code ({reference}): pass --trust-remote-code to run it, or put a "
            "tokenizer.json beside config.json"
        )
    if reference:
        return backend_of_code(folder, reference)
    from transformers import AutoTokenizer  # imports torch: only for folders without tokenizer.json

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UnsupportedBase(f"the base has no tokenizer.json, and transformers cannot make one: {_ADVICE}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedBase(f"the base has no tokenizer.json, and its tokenizer has no fast form: {_ADVICE}")
    return backend


def _add_bos(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Apply an explicit `add_bos_token` that differs from `tokenizer.json`, as transformers does."""
    wanted, bos = config.get("add_bos_token"), special_tokens.get("bos_token")
    id = None if bos is None else backend.token_to_id(bos)
    if not isinstance(wanted, bool) or bos is None or id is None:
        return
    if (id in backend.encode("a", add_special_tokens=True).ids) != wanted:
        template = f"{bos} $A" if wanted else "$A"
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=[(bos, id)])
