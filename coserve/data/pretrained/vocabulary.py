"""Bytes, name and position in a text of each token; the only place that derives them. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary. Printable characters stand for themselves, the
    characters from U+0100 on for the remaining bytes."""
    alphabet = {character: ord(character) for character in ByteLevel.alphabet() if ord(character) < 256}
    rest = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Bytes and names of one base's tokens. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend, self._decoder = backend, backend.decoder
        self._byte_level = self._joined("a", "Ġ") == "a "
        self._byte_fallback = self._joined("<0x61>") == "a"
        added = backend.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in added.items()}
        """Ids of the added tokens, special or not, by their text."""
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._swallows = {id: token.content for id, token in added.items() if token.lstrip or token.rstrip}
        """Added tokens whose span in a text includes the adjacent white space."""
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def _joined(self, *pieces: str) -> str:
        text: str = " ".join(pieces) if self._decoder is None else self._decoder.decode(list(pieces))
        return text

    def has(self, id: int) -> bool:
        """Return whether a token has this id."""
        return self._backend.id_to_token(id) is not None

    def utf8(self, id: int) -> bytes:
        """Return the UTF-8 bytes that the token adds to a text it continues, possibly an incomplete character. Empty
        for an id without a token."""
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._bytes_of(self._backend.id_to_token(id) or "")
        return found

    def _bytes_of(self, piece: str) -> bytes:
        if self._byte_level:
            known = [_ALPHABET.get(character) for character in piece]
            stands = [byte for byte in known if byte is not None]
            return bytes(stands) if len(stands) == len(known) else piece.encode()
        if self._byte_fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return self._joined("a", piece).removeprefix(self._joined("a")).encode()

    def name(self, id: int) -> str:
        r"""Return the token's text, special or not. An incomplete character gives its bytes, as OpenAI writes them:
        `bytes:\xf0\x9f`."""
        found = self._names.get(id)
        if found is None:
            own = self.utf8(id)
            try:
                found = own.decode()
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
            self._names[id] = found
        return found

    def places(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
        """Return the span of each token's own characters in `text`: `offsets` without the white space that added tokens
        with `lstrip` or `rstrip` swallow."""
        return [self._place(*found, text) for found in zip(ids, offsets, strict=True)]

    def _place(self, id: int, offsets: tuple[int, int], text: str) -> tuple[int, int]:
        content = self._swallows.get(id)
        at = -1 if content is None else text.find(content, *offsets)
        return offsets if content is None or at < 0 else (at, at + len(content))
