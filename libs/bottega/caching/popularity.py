"""Eviction by popularity over a sliding window of uses, with the last use as the tie-break. There is no clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

# Number of remembered uses. Of the last 1000, the least popular ControlNet worth caching in the trace has 66 and the
# next one 17 (Katz, service B). That is too far apart for chance, and covers a few hours of a busy service, so that a
# change of popularity is followed within a day.
WINDOW = 1000

# How many times more popular an absent item must be than all items that it would replace unrequested. With less, two
# items of about the same popularity would replace each other forever.
_WORTH_REPLACING = 2


class EvictionOrder(Protocol):
    """An order of eviction that is learnt from uses."""

    def used(self, name: str) -> None:
        """Count a use."""
        ...

    def value(self, name: str) -> tuple[int, int]:
        """Return a sort key; the least goes first."""
        ...

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        """Return whether to load `absent` unrequested in place of all of `others`, none of which is in use."""
        ...


class Popularity:
    """The number of uses among the last `window` ones. Of equals, the least recently used goes first."""

    def __init__(self, window: int = WINDOW) -> None:
        self._recent: deque[str] = deque(maxlen=window)
        self._counts: Counter[str] = Counter()
        self._last_use: dict[str, int] = {}
        self._uses = 0

    @property
    def counts(self) -> dict[str, int]:
        """Number of uses in the window by name, the most popular first."""
        return dict(self._counts.most_common())

    def used(self, name: str) -> None:
        """Count a use, and forget the oldest one if the window is full."""
        if len(self._recent) == self._recent.maxlen:
            self._forget(self._recent[0])
        self._recent.append(name)
        self._counts[name] += 1
        self._uses += 1
        self._last_use[name] = self._uses

    def value(self, name: str) -> tuple[int, int]:
        """Return the number of uses in the window, and the time of the last one."""
        return self._counts[name], self._last_use.get(name, 0)

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        """Return whether it is used twice as often as all others together."""
        return self._counts[absent] >= _WORTH_REPLACING * max(1, sum(self._counts[name] for name in others))

    def _forget(self, name: str) -> None:
        self._counts[name] -= 1
        if not self._counts[name]:
            # A name without uses in the window is forgotten, so that names never exceed the window.
            del self._counts[name], self._last_use[name]
