"""Prompts as the users of a picture service send them, over the miniature's grammar: the load of an approximate cache.

Many users are at work at once. Each begins a session with a topic's prompt as it stands in a gallery; topics have the
popularity of ranks (Zipf's law). Then they refine: the same prompt again (for another picture), the same scene in other
words, or a scene that differs in one part. Popularity drifts: now and then a new topic comes in at a random rank, which
moves those below it down by one, and the last one out.

DiffusionDB has real prompts with their user and time, but its prompts are not of the grammar that the miniature draws;
the figures of a StreamShape are ours and not fitted to it. The same shape and seed give the same prompts on every
machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.miniature.scenes import Scene, any_caption, caption, random_scene, refine
from bottega.strict import STRICT

# Of the topics, so many show two things; the miniature's training has the same share.
_TWO_SHARE = 0.55

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShape:
    """The users and their topics."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    topics: Annotated[int, Field(ge=1)] = 300
    """Topics that are known at any time."""
    exponent: Annotated[float, Field(ge=0)] = 1.0
    """Of their popularity, 1 / rank ** exponent."""
    drift: Share = 0.02
    """New topics a session."""
    users: Annotated[int, Field(ge=1)] = 100
    """Sessions at a time, whose prompts come in between each other's."""
    session: Annotated[float, Field(ge=1)] = 3.0
    """Prompts of a session on average; its length is geometric."""
    again: Share = 0.2
    """Share of a session's later prompts that repeat the one before."""
    rephrased: Share = 0.2
    """Share that has its scene in other words; the others are refined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPrompt:
    """A prompt, and the number of its session, from 0."""

    session: int
    prompt: str


def prompts(count: int, shape: StreamShape, *, seed: int) -> list[str]:
    """Return the first `count` prompts of a stream."""
    return [each.prompt for each in islice(stream(shape, random.Random(seed)), count)]


def stream(shape: StreamShape, chance: random.Random) -> Iterator[SessionPrompt]:
    """Yield prompts, without end."""
    return _Stream(shape, chance).prompts()


class _Stream:
    def __init__(self, shape: StreamShape, chance: random.Random) -> None:
        self._shape = shape
        self._chance = chance
        self._topics = [self._scene() for _ in range(shape.topics)]
        self._popularity = [rank**-shape.exponent for rank in range(1, shape.topics + 1)]

    def prompts(self) -> Iterator[SessionPrompt]:
        """Yield prompts, without end, each of a user drawn anew."""
        begun = itertools.count(self._shape.users)
        sessions = {user: (user, self._session()) for user in range(self._shape.users)}
        while True:
            user = self._chance.randrange(len(sessions))
            number, session = sessions[user]
            prompt = next(session, None)
            if prompt is None:
                sessions[user] = (next(begun), self._session())
            else:
                yield SessionPrompt(session=number, prompt=prompt)

    def _session(self) -> Iterator[str]:
        """Yield the prompts of a session, at least one."""
        chance, shape = self._chance, self._shape
        scene = self._topic()
        prompt = caption(scene)
        yield prompt
        while chance.random() < 1.0 - 1.0 / shape.session:
            kind = chance.random()
            if kind >= shape.again:
                if kind >= shape.again + shape.rephrased:
                    scene = refine(scene, chance)
                prompt = any_caption(scene, chance)
            yield prompt

    def _topic(self) -> Scene:
        if self._chance.random() < self._shape.drift:
            self._topics.insert(self._chance.randrange(len(self._topics)), self._scene())
            self._topics.pop()
        (topic,) = self._chance.choices(self._topics, self._popularity)
        return topic

    def _scene(self) -> Scene:
        return random_scene(self._chance, things=1 + (self._chance.random() < _TWO_SHARE))
