"""PEFT's patterns for module names, matched in linear time (RE2). No torch, no files.

Patterns come from untrusted files. RE2 never backtracks. The cost of a whole table of patterns is counted in steps
before it runs, so that a file is accepted or refused alike on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import re2

from coserve.lora.files.targets import is_name, pattern_matches

MAX_STEPS = 1 << 26
"""Budget of all patterns of one config, in `Steps`; about half a second at most."""
_LEAST_STEPS = 1 << 8
_COMPILED_STEPS = 1 << 6
"""Steps charged per instruction of a compiled pattern."""
_REFUSED_STEPS = 1 << 20
"""Steps charged for a pattern that turns out too large while it is compiled."""
_MAX_BYTES = 1 << 20
"""Memory limit of one compiled pattern, in bytes."""

# The syntax that Python and RE2 read alike: no other groups, no counts without a lower bound, no POSIX classes.
_SHARED = re.compile(
    r"""(?:
        [A-Za-z0-9_\-,:;<>=!@\#%&'"~/\ ]
      | [.^$|)] | \((?:\?:|(?!\?))
      | [*+?]\?? | \{\d{1,3}(?:,\d{0,3})?\}\??
      | \\[dDwWsSbB] | \\[.\-/:\[\](){}|*+?^$\\]
      | \[\^?+(?:[A-Za-z0-9_\-.,:/^$|*+?(){} ]|\\[dDwWsS]|\\[.\-/\[\]^\\])++\]
    )*+""",
    re.VERBOSE,
)


MAX_EXPRESSIONS = 64
"""Most regular expressions in a table of ranks or alphas: compiling one takes about 60 us. Plain names are not
counted."""


class UnsupportedPattern(ValueError):
    """A pattern that only a backtracking engine could match, or that costs too much."""


class Steps:
    """A budget that matching draws on: an instruction of a pattern times a character of a name is one step."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise UnsupportedPattern("the patterns take too long to match")


class Pattern:
    """One regular expression, compiled when it is first asked for."""

    def __init__(self, source: str, steps: Steps, *, form: str = "{}") -> None:
        """`form`: a format string around the pattern, with `{}` in its place."""
        self._source, self._steps, self._form = source, steps, form
        self._compiled: re2._Regexp | UnsupportedPattern | None = None

    def match(self, name: str) -> re.Match[str] | None:
        """Match like Python's `re.match`; `name` is ASCII. Raises `UnsupportedPattern`."""
        if self._compiled is None:
            self._compiled = self._compile()
        if isinstance(self._compiled, UnsupportedPattern):
            raise self._compiled
        self._steps.spend(max(_LEAST_STEPS, self._compiled.programsize * (len(name) + 1)))
        found: re.Match[str] | None = self._compiled.match(name)
        return found

    def _compile(self) -> re2._Regexp | UnsupportedPattern:
        if not _SHARED.fullmatch(self._source):
            return UnsupportedPattern(f"{self._source[:80]!r} is no regular expression that RE2 reads as Python does")
        self._steps.spend(_REFUSED_STEPS)
        options = re2.Options()
        options.max_mem, options.log_errors = _MAX_BYTES, False
        try:
            compiled = re2.compile(self._form.replace("{}", self._source), options)
        except re2.error:
            return UnsupportedPattern(f"{self._source[:80]!r} is too large, or no regular expression of RE2's")
        self._steps.spend(_COMPILED_STEPS * compiled.programsize - _REFUSED_STEPS)
        return compiled


class FirstMatch:
    """Finds the first of several patterns that matches a site, like PEFT's `get_pattern_key`."""

    def __init__(self, sources: Iterable[str], steps: Steps) -> None:
        self._steps = steps
        self._patterns = {
            source: None if is_name(source) else Pattern(source, steps, form=r"(.*\.)?({})$") for source in sources
        }
        self._too_many = sum(pattern is not None for pattern in self._patterns.values()) > MAX_EXPRESSIONS

    def find(self, site: str) -> str | None:
        """Return that pattern, or None. Raises `UnsupportedPattern` if a pattern that must be tried first cannot be
        matched."""
        if self._too_many:
            raise UnsupportedPattern(f"expected at most {MAX_EXPRESSIONS} regular expressions, got more")
        for source, pattern in self._patterns.items():
            if pattern is None:
                self._steps.spend(_LEAST_STEPS)
                if pattern_matches(source, site):
                    return source
            elif pattern.match(site):
                return source
        return None


def whole(source: str, steps: Steps) -> Pattern:
    """Return a pattern that matches whole names only, like `re.fullmatch`."""
    return Pattern(source, steps, form=r"(?:{})\z")
