"""The two clocks that the gateway reads, as one value, so that tests can turn them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """monotonic: for spans and deadlines, in seconds. wall: Unix time in seconds, for people."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
