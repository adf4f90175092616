"""Made-up chats that teach a task with one right answer: a sentence about a meeting, as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import NamedTuple

TRAINED, UNSEEN = 30, 6
"""Chats to learn from, and to test with."""
SYSTEM = "Turn the sentence into JSON."
_NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam")
_ROOMS = ("Amber", "Birch", "Cedar", "Delta", "Ember", "Flint")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_TOPICS = ("the budget", "the roadmap", "hiring", "the launch", "the audit", "training")
_SENTENCES = (
    "{who} meets us on {day} at {time} in room {room} to talk about {topic}.",
    "On {day} at {time}, {who} wants to discuss {topic} in room {room}.",
    "Room {room} is booked for {who} on {day} at {time}: {topic}.",
    "Please come to room {room} at {time} on {day}; {who} will speak about {topic}.",
)


class Meeting(NamedTuple):
    """A chat: what is asked, and the only right answer."""

    question: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat without its answer."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.question}]

    @property
    def row(self) -> dict[str, object]:
        """A row of a corpus."""
        return {"messages": [*self.messages, {"role": "assistant", "content": self.answer}]}


def meetings() -> tuple[Sequence[Meeting], Sequence[Meeting]]:
    """Return `TRAINED` chats to learn from and `UNSEEN` others."""
    drawn = random.Random(0)
    found: dict[str, Meeting] = {}
    while len(found) < TRAINED + UNSEEN:
        facts = {
            "who": drawn.choice(_NAMES),
            "day": drawn.choice(_DAYS),
            "time": f"{drawn.randrange(8, 18)}:{drawn.choice(('00', '15', '30', '45'))}",
            "room": drawn.choice(_ROOMS),
            "topic": drawn.choice(_TOPICS),
        }
        question = drawn.choice(_SENTENCES).format(**facts)
        found[question] = Meeting(question, json.dumps(facts))
    chats = tuple(found.values())
    return chats[:TRAINED], chats[TRAINED:]
