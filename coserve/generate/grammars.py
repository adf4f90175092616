"""Constraints on the tokens of requests: grammars, which are compiled on a thread, cached, and matched token by token
on the CPU; and token rules, which are allowed ids and bad words.

A matcher knows which tokens may follow the tokens that it accepted. A step's masks are computed after the previous
step's tokens were collected, while the device runs the step's forward: only the choice of tokens waits for them.
"""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from coserve.core.errors import InvalidRequest, UnsupportedBase
from coserve.core.grammar import Grammar
from coserve.core.link.generation import Generate
from coserve.data.grammar import limits, llguidance_grammar, plain_reason, with_calls
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.generate.sampling.masks import Masks
from coserve.queues.request import Request

WORD = 32
"""Tokens per word of a mask."""
Words = npt.NDArray[np.uint32]
"""Bit i of the words (W) is token i: 1 if it may come next."""

CACHED = 64
"""Compiled grammars kept for later requests."""
PLAIN = r'[^"\\\x00-\x1F\x7F]'
"""A character of a JSON string that is not escaped."""
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{PLAIN}{{1,{most}}}" for most in (1, 2, 3, 4, 6, 8, 10, 20, 30)), f"{PLAIN}+"]
"""Sets of tokens whose masks are computed once. The short ones are those that still fit into a string near its greatest
length: without them such a mask walks the whole vocabulary, which takes milliseconds."""


class Matcher:
    """Follows one request's tokens through its grammar and its token rules. Implements `queues.request.Constraint`."""

    def __init__(self, state: LLMatcher | None, rules: TokenRules | None) -> None:
        """`state`: of the grammar; None: any text."""
        self.state, self.rules = state, rules

    def accept(self, token: int) -> bool:
        if self.rules is not None:
            self.rules.accept(token)
        if self.state is None:
            return False
        self.state.consume_token(token)
        return self.state.is_stopped()

    @property
    def error(self) -> str:
        return "" if self.state is None else self.state.get_error()

    def finish_mask(self, words_W: Words, ends: Iterable[int]) -> None:
        """Add what the grammar's mask lacks: the request's own `ends`, where the grammar may end, and its rules."""
        if self.state is not None and self.state.is_accepting():
            set_bits(words_W, tuple(ends), allowed=True)
        if self.rules is not None:
            self.rules.apply(words_W)


class Grammars:
    """Compiles grammars for one base. `vocab`: width of its logits. `tokenizer` is called once, on a thread. `pinned`:
    masks are copied to a GPU."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab: int, *, pinned: bool = False) -> None:
        self._load, self._vocab, self.words, self._pinned = tokenizer, vocab, -(-vocab // WORD), pinned
        self._room = torch.empty(0, self.words, dtype=torch.int32)
        """Host buffer (R, W) of a step's masks. Each step reuses it: once the previous step's tokens are known, its
        masks were applied."""
        self._threads = ThreadPoolExecutor(1, "grammars")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._changed: Callable[[], None] = lambda: None

    def notify(self, changed: Callable[[], None]) -> None:
        """Call `changed`, on a thread, whenever a grammar was compiled."""
        self._changed = changed

    def warm_up(self) -> None:
        """Load the tokenizer and compile a first grammar, which for a large vocabulary takes a second or two."""
        self._begin(Grammar("json_schema", '{"type":"object"}')).exception()

    def ready(self, grammar: Grammar) -> bool:
        """Whether `matcher` would not wait. If it would, start to compile the grammar."""
        return self._begin(grammar).done()

    def compiled(self, grammar: Grammar) -> LLMatcher:
        """Wait for a grammar to be compiled; return its first matcher, to be copied. Raises `InvalidRequest`."""
        return self._begin(grammar).result()

    def matcher(self, request: Generate) -> Matcher | None:
        """Return a new matcher; None: nothing constrains the request. Waits for its grammar to be compiled. Raises
        `InvalidRequest`."""
        state = None if request.grammar is None else self.compiled(request.grammar).deep_copy()
        ruled = request.allowed_token_ids is not None or request.bad_words
        rules = TokenRules(request.allowed_token_ids, request.bad_words, self.words) if ruled else None
        return None if state is None and rules is None else Matcher(state, rules)

    def masks(self, requests: Sequence[Request]) -> Masks:
        """Return the mask of each constrained request: bit i of the int32 words is token i, 1 if it may come next. They
        are valid until the next call, which comes after the step's tokens."""
        rows = [(request, one) for request in requests if isinstance(one := request.constraint, Matcher)]
        if len(rows) > len(self._room):
            self._room = torch.empty(len(rows), self.words, dtype=torch.int32, pin_memory=self._pinned)
        words = self._room[: len(rows)].fill_(-1)
        bits = words.numpy().view(np.uint32)
        states = [(one.state, row) for row, (_, one) in enumerate(rows) if one.state is not None]
        if states:
            self._executor.unsafe_compute_mask_ptr(states, bits.ctypes.data, 4 * self.words, len(rows))
        for row, (request, one) in enumerate(rows):
            one.finish_mask(bits[row], request.stop_ids)
        return Masks({request.number: row for row, (request, _) in enumerate(rows)}, words)

    def _begin(self, grammar: Grammar) -> Future[LLMatcher]:
        found = self._compiled.get(grammar)
        if found is None:
            # Requests wait for those that are not done: each would be compiled for ever if they displaced one another.
            done = [each for each, compiling in self._compiled.items() if compiling.done()]
            for oldest in done[: max(0, len(done) + 1 - CACHED)]:
                del self._compiled[oldest]
            found = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
            found.add_done_callback(lambda _: self._changed())
        self._compiled.move_to_end(grammar)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        text = llguidance_grammar(grammar)
        if grammar.calls:
            text = with_calls(text, grammar.calls, self._special_token)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # computes the first states once, for all copies
        if matcher.is_error():
            raise InvalidRequest(f"expected a grammar that can be enforced, got: {plain_reason(matcher.get_error())}")
        return matcher

    def _special_token(self, text: str) -> int | None:
        ids = self._tokenizer.tokenize_str(text, parse_special=True)
        return ids[0] if len(ids) == 1 and self._tokenizer.is_special_token(ids[0]) else None

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            found = self._load()
            ends = list(found.eos_token_ids) or None
            return LLTokenizer(found.serialised(), n_vocab=self._vocab, eos_token=ends, slices=SLICES)
        except (UnsupportedBase, ValueError) as error:
            raise InvalidRequest(f"the base's tokenizer does not support grammars: {error}") from error

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(max(1, min(16, (os.cpu_count() or 1) // 2)))


def set_bits(words_W: Words, tokens: Sequence[int], *, allowed: bool) -> None:
    """Set the tokens' bits in place to whether they are `allowed`."""
    ids = np.array(tokens, np.int64)
    bits = np.left_shift(np.uint32(1), (ids % WORD).astype(np.uint32))
    if allowed:
        np.bitwise_or.at(words_W, ids // WORD, bits)
    else:
        np.bitwise_and.at(words_W, ids // WORD, ~bits)


class TokenRules:
    """Allowed token ids and bad words of one request, and its output so far. A step checks only the bad words whose
    last token but one was just sampled."""

    def __init__(self, allowed: Sequence[int] | None, bad_words: Sequence[tuple[int, ...]], words: int) -> None:
        """`allowed`: token ids; None: all. `bad_words`: token sequences that the output must not have."""
        self._may_W = np.full(words, 0 if allowed is not None else ~np.uint32(0), np.uint32)
        set_bits(self._may_W, allowed or (), allowed=True)
        set_bits(self._may_W, [word[0] for word in bad_words if len(word) == 1], allowed=False)
        self._ends: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        """Bad words of several tokens, by their last token but one: all tokens but the last, and the last."""
        for *start, last in bad_words:
            if start:
                self._ends[start[-1]].append((start, last))
        self._output: list[int] = []

    def accept(self, token: int) -> None:
        """Take a sampled token."""
        self._output.append(token)

    def apply(self, words_W: Words) -> None:
        """Clear the bits of the tokens that must not come next."""
        words_W &= self._may_W
        ends = self._ends.get(self._output[-1], ()) if self._output else ()
        set_bits(words_W, [last for start, last in ends if self._output[-len(start) :] == start], allowed=False)
