"""Checks of the settings that say who may call the daemon. Each raises `ConfigError`; `name`: the setting's."""

from __future__ import annotations

import re

from coserve.core.errors import ConfigError

MIN_SECRET = 16
"""Minimum characters of an API key. A random key of 16 characters cannot be guessed over a network."""


def check_secret(name: str, secret: str) -> None:
    """Refuse a secret that is empty, short, or not valid in a header. The message never shows it."""
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"{name}: expected at least {MIN_SECRET} characters, got {len(secret)}")
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ConfigError(f"{name}: expected printable ASCII characters without blanks")


def check_host(name: str, host: str) -> None:
    """Refuse what is no name or address by itself: one with a port would match no `Host` header."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f.:]*:[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*", host):
        raise ConfigError(f"{name}: expected a host name or address without a port, got {host!r}")


def check_origin(name: str, origin: str) -> None:
    """Refuse what is neither `*` nor a web page's origin as browsers send it."""
    known = r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
    if origin != "*" and not re.fullmatch(known, origin, re.IGNORECASE):
        raise ConfigError(
            f"{name}: expected * or a scheme, a name and maybe a port, such as https://app.example:8443, got {origin!r}"
        )
