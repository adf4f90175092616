"""Patterns of module names: what PEFT's own regular expressions say, in a number of steps that is counted."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

from coserve.lora.files.matching import Matching
from coserve.lora.files.patterns import MAX_STEPS, FirstMatch, Pattern, Steps, UnsupportedPattern, whole
from tests.support.examples import examples

SITES = [
    f"model.layers.{i}.{name}" for i in (0, 1, 11) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
]
SITES += ["model.layers.1.mlp.experts.0.up_proj", "transformer.h.2.attn.c_attn", "lm_head"]

names = st.lists(st.sampled_from(["a", "b", "0", "_", "-", ".", "ab"]), max_size=6).map("".join) | st.sampled_from(
    SITES
)
_atoms = st.sampled_from(
    [
        *("a", "b", "0", "_", "-", ".", "ab", r"\.", r"\d", r"\w", r"\W", r"\b", "[ab]", "[^.]", "[a-z_]", r"[\d.]"),
        *("^", "$", "q_proj", "o_proj", "up_proj", "layers", "self_attn", "mlp", "model", "1", "", r"\S", r"\-", "é"),
        *("(?=a)", "(?i)"),
    ]
)
_repeats = st.sampled_from(["", "*", "+", "?", "*?", "+?", "??", "{2}", "{0,1}", "{1,}", "{,2}", "*+", "{1,2}?"])
patterns = st.recursive(
    st.tuples(_atoms, _repeats).map("".join),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(st.sampled_from(["(", "(?:"]), inner, st.just(")"), _repeats).map("".join),
    ),
    max_leaves=8,
)


def _python(form: str, pattern: str) -> re.Pattern[str] | None:
    """None: PEFT itself would raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return re.compile(form.replace("{}", pattern))
        except re.error:
            return None


@settings(max_examples=examples(400), deadline=None)
@given(patterns, st.lists(names, min_size=1, max_size=4))
def test_a_pattern_matches_as_pythons_or_is_refused(pattern: str, sites: list[str]) -> None:
    oracle = _python(r"(.*\.)?({})$", pattern)
    whole_oracle = _python("{}", pattern)
    for site in sites:
        for ours, theirs in (
            (FirstMatch([pattern], Steps()).find, oracle and oracle.match),
            (whole(pattern, Steps()).match, whole_oracle and whole_oracle.fullmatch),
        ):
            try:
                got = ours(site)
            except UnsupportedPattern:
                continue
            if theirs:
                assert (got is not None) == (theirs(site) is not None)


def _few_repeats(pattern: str) -> bool:
    """PEFT matches with `re`, which takes as good as for ever for repeats of repeats."""
    return sum(map(pattern.count, "*+{")) <= 3


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(patterns.filter(_few_repeats), max_size=4, unique=True), st.lists(names, min_size=1, max_size=4))
def test_the_first_pattern_wins_as_in_peft(keys: list[str], sites: list[str]) -> None:
    first = FirstMatch(keys, Steps())
    for site in sites:
        try:
            got = first.find(site)
        except UnsupportedPattern:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                key = get_pattern_key(keys, site)
        except re.error:
            continue
        assert got == (key if key in keys else None)


_modules = st.lists(
    st.sampled_from(["q_proj", "o_proj", "up_proj", "self_attn.q_proj", "1.mlp.up_proj", SITES[0], "c_attn"]),
    min_size=1,
    max_size=3,
)
_lists = st.sampled_from(["layers", "h", "experts", r"laye\w*", "layers|h"])


@settings(max_examples=examples(300), deadline=None)
@given(
    targets=_modules | patterns.filter(bool).filter(_few_repeats),
    excluded=st.none() | _modules | patterns.filter(_few_repeats),
    layers=st.none() | st.integers(0, 2) | st.lists(st.integers(0, 11), max_size=3),
    lists=st.none() | _lists | st.lists(_lists, max_size=2),
)
def test_the_sites_that_peft_would_adapt_are_targeted(
    targets: list[str] | str,
    excluded: list[str] | str | None,
    layers: int | list[int] | None,
    lists: list[str] | str | None,
) -> None:
    if isinstance(targets, str) or layers is None:
        layers = lists = None  # PEFT takes them together only
    settings = {"exclude_modules": excluded, "layers_to_transform": layers, "layers_pattern": lists}
    config = LoraConfig(target_modules=targets, **settings)
    matching = Matching({"target_modules": targets} | settings)
    for site in SITES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = check_target_module_exists(config, site)
        except re.error:
            continue
        adapted = bool(found) and not isinstance(found, _ExcludedModule)
        assert matching.targeted(site) or not adapted, "PEFT adapts it"
        if not any(isinstance(one, str) for one in (targets, excluded, lists)):
            assert matching.targeted(site) == adapted


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|up_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|up_proj)))"
)


def test_what_unsloth_writes_is_matched() -> None:
    targeted = Matching({"target_modules": UNSLOTH}).targeted
    assert [site for site in SITES if targeted(site)] == [site for site in SITES if re.fullmatch(UNSLOTH, site)]
    assert targeted(SITES[0])
    assert not targeted("model.layers.0.self_attn.o_proj")


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(a)\1", "(?=a)a", "(?<!a)b", "(?i)a", "(?P<x>a)", "a++", "a{,3}", "[[:alpha:]]", r"\pL", "é", r"\Qa\E"),
        "a" * 9**6,
    ],
)
def test_what_re2_cannot_match_or_reads_differently_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        FirstMatch([pattern + "|b"], Steps()).find("x")


def test_matching_is_charged_before_it_runs() -> None:
    """The cost is a function of patterns and names alone: instructions times characters, and each compilation."""
    steps = Steps()
    pattern = Pattern("(?:a|b)*c", steps)
    pattern.match("abc")
    compiled = MAX_STEPS - steps.left
    pattern.match("abc")
    again = MAX_STEPS - steps.left - compiled
    assert 0 < again < compiled
    pattern.match("abc" * 1000)
    assert MAX_STEPS - steps.left - compiled - again > 50 * again
    with pytest.raises(UnsupportedPattern, match="too long"):
        for _ in range(MAX_STEPS):
            pattern.match("abc" * 1000)
    assert steps.left < 0


def test_many_patterns_together_stay_within_the_steps() -> None:
    """A megabyte of small patterns, of large ones, and of ones that are too large: all end in a bounded number of
    tries."""
    for sources in (
        [f"a{i}" for i in range(150_000)],
        [f"(?:{i}|{'a' * 500}){{100}}" for i in range(2_000)],
        [f"(?:{i}a{{500}}){{900}}" for i in range(60_000)],
    ):
        steps, tries = Steps(), 0
        first = FirstMatch(sources, steps)
        with pytest.raises(UnsupportedPattern):
            for _ in range(100_000):
                first.find(SITES[0])
                tries += 1
        assert tries < 100
