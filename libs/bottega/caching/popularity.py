"""Which of several things to let go first: by popularity over a sliding window, least recently used as the tie-break.

The window is so many uses long; there is no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

# Uses that are remembered. Of the last 1000, the least popular ControlNet that is worth keeping in the trace has
# 66 and the next one 17 (Katz, service B): far enough apart to be told from chance, and a few hours of a busy
# service, so that a change of fashion is followed within a day.
WINDOW = 1000

# How many times more popular an absent thing must be than all that it would replace unasked: less, and two of about
# the same popularity would take turns for ever.
_WORTH_REPLACING = 2


class EvictionOrder(Protocol):
    """An order in which things are let go, learnt from their uses."""

    def used(self, name: str) -> None:
        """It has been used."""
        ...

    def value(self, name: str) -> tuple[int, int]:
        """The least goes first."""
        ...

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        """Whether to bring `absent` back unasked in place of all of `others`, none of which is in use."""
        ...


class Popularity:
    """Uses among the last `window` ones; of equals, the one used longest ago goes first."""

    def __init__(self, window: int = WINDOW) -> None:
        self._recent: deque[str] = deque(maxlen=window)
        self._counts: Counter[str] = Counter()
        self._last_use: dict[str, int] = {}
        self._uses = 0

    @property
    def counts(self) -> dict[str, int]:
        """Uses in the window by name, the most popular first."""
        return dict(self._counts.most_common())

    def used(self, name: str) -> None:
        """Counts a use, and forgets the oldest one that is remembered."""
        if len(self._recent) == self._recent.maxlen:
            self._forget(self._recent[0])
        self._recent.append(name)
        self._counts[name] += 1
        self._uses += 1
        self._last_use[name] = self._uses

    def value(self, name: str) -> tuple[int, int]:
        """Uses in the window, then the time of the last one."""
        return self._counts[name], self._last_use.get(name, 0)

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        """Whether it is used twice as often as all others together."""
        return self._counts[absent] >= _WORTH_REPLACING * max(1, sum(self._counts[name] for name in others))

    def _forget(self, name: str) -> None:
        self._counts[name] -= 1
        if not self._counts[name]:
            # What is not in the window has no last use either, so that names never grow beyond the window.
            del self._counts[name], self._last_use[name]
