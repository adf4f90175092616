"""Where the answers of a long chat lie in its text: as found one by one, in time that grows with the chat's length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.errors import InvalidRequest
from coserve.data.pretrained.chat import SHORT, ChatTemplate
from tests.support.chat_templates import SHIPPED, SPECIALS

TOKENS = {"bos_token": "<bos>", "eos_token": "<|endoftext|>"}
_PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
TEMPLATES = SHIPPED | {
    "plain": "{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT,
    "no end of turn": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "alternates": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + _TURN + "{% endfor %}" + _PROMPT,
    "numbered": "{% for m in messages %}{{ loop.index }}" + _TURN + "{% endfor %}{{ messages | length + 1 }}" + _PROMPT,
    "numbered after all": "{% for m in messages %}{{ loop.index }}"
    + _TURN
    + "{% endfor %}{% if add_generation_prompt %}{{ messages | length + 1 }}<|assistant|>{% endif %}",
    "counts": "{{ messages | length }}{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT,
    "every third": "{% for m in messages %}{{ '!' if loop.index0 % 3 == 0 }}" + _TURN + "{% endfor %}" + _PROMPT,
    "forgets": "{% for m in messages[-9:] %}" + _TURN + "{% endfor %}" + _PROMPT,
    "shortens": "{% for m in messages %}<|{{ m.role }}|>{{ m.content[:9] if loop.revindex > 20 else m.content }}<|end|>"
    "{% endfor %}" + _PROMPT,
    "remembers": "{% set ns = namespace(sum=0) %}{% for m in messages %}{% set ns.sum = ns.sum + m.content | length %}"
    "{{ ns.sum if m.role == 'user' }}" + _TURN + "{% endfor %}" + _PROMPT,
    "first user": "{% for m in messages %}{% if m.role == 'user' and loop.first %}{{ bos_token }}{% endif %}"
    + _TURN
    + "{% endfor %}"
    + _PROMPT,
}
TEXTS = st.sampled_from(
    ["", " ", "yes", "yes", "yes\n", "a longer answer than nine", "<|end|>", "<think>\nhm\n</think>\n\nyes"]
)
ROLES = st.sampled_from(["user", "assistant", "tool"])
ALTERNATING = st.lists(TEXTS, min_size=SHORT + 2, max_size=50).map(
    lambda texts: [(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
)
ANY_ORDER = st.lists(st.tuples(ROLES, TEXTS), min_size=SHORT + 2, max_size=50)
SYSTEM = st.sampled_from([[], [("system", "Be kind.")], [("system", "Be kind."), ("developer", "Be brief.")]])


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@given(system=SYSTEM, turns=ALTERNATING | ANY_ORDER, skipped=st.sets(st.integers(0, 50), max_size=9))
def test_all_answers_are_found_as_each_by_itself(
    source: str, system: list[tuple[str, str]], turns: list[tuple[str, str]], skipped: set[int]
) -> None:
    """With one answer to learn, every chat before it is rendered as it is."""
    template = ChatTemplate(source, TOKENS, SPECIALS)
    messages = [{"role": role, "content": text} for role, text in (*system, *turns)]
    learned = [at for at, one in enumerate(messages) if one["role"] == "assistant" and at not in skipped]
    each = [_found(template, messages, [at]) for at in learned]
    refusals = [found for found in each if isinstance(found, str)]
    if not learned:
        return
    if refusals:
        expected = next((text for text in refusals if "train_on" in text), refusals[0])
        assert _found(template, messages, learned) == expected
    else:
        assert _found(template, messages, learned) == [span for found in each for span in found]


@pytest.mark.parametrize("longest", [30, 44])
def test_a_longer_chat_may_have_another_generation_prompt(longest: int) -> None:
    """Which every answer begins with, so that the text does not tell."""
    thought = f"{{{{ '<think>' if messages | length > {longest} }}}}"
    prompt = "{% if add_generation_prompt %}<|assistant|>" + thought + "{% endif %}"
    source = "{% for m in messages %}" + _TURN + "{% endfor %}" + prompt
    template = ChatTemplate(source, TOKENS, SPECIALS)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>hm</think>yes"}] * 30
    text, spans, _ = template.render_for_training(turns)
    thinking = [text[start:].startswith("<think>") for start, _ in spans]
    assert thinking == [at <= longest for at in range(1, 60, 2)]


def _found(
    template: ChatTemplate, messages: Sequence[Mapping[str, object]], learned: Sequence[int]
) -> list[tuple[int, int]] | str:
    """Spans to learn, or why there are none."""
    try:
        return template.render_for_training(messages, learned=learned).spans
    except InvalidRequest as error:
        return error.message


class Counted(Mapping[str, object]):
    """A message that counts how often one is given to a template."""

    given = 0

    def __init__(self, role: str) -> None:
        self._fields = {"role": role, "content": "a text"}

    def __getitem__(self, name: str) -> object:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        Counted.given += 1
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@pytest.mark.parametrize("name", ["plain", "phi-3", "alternates", "no end of turn", "qwen3", "first user"])
@pytest.mark.parametrize("roles", [["user", "assistant"], ["tool", "assistant"]], ids="-".join)
def test_the_work_grows_with_the_length_of_the_chat(name: str, roles: list[str]) -> None:
    """Also of what is refused, as Qwen 3's earlier answers are."""
    template = ChatTemplate(TEMPLATES[name], TOKENS, SPECIALS)
    given = []
    for turns in (500, 1000):
        Counted.given = 0
        messages = [Counted("user"), Counted("assistant"), *(Counted(role) for role in roles * turns)]
        _found(template, messages, range(1, len(messages), 2))
        given.append(Counted.given)
    assert given[1] < 2.5 * given[0] and given[1] < 40 * 2000
