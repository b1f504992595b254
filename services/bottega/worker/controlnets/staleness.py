"""Whether a request waits for each step's residuals, or goes on with those of the step before.

Measures how long a step's encoder half takes, and the step; decides by planning.pipelines.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bottega.diffusion.controlnets.provider import ControlInput
from bottega.planning import pipelines

_WEIGHT = 0.3


class StalenessPolicy:
    """Of one engine's turns."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_s: float | None = None
        self._encoder_s = 0.0
        self._step_s = 0.0
        self._needed = True

    def on_turn(self) -> None:
        """A turn has begun."""
        now_s = self._clock()
        if self._asked_s is not None:
            self._step_s = _smoothed(self._step_s, now_s - self._asked_s)
        self._asked_s, self._needed = now_s, False

    def on_idle(self) -> None:
        """The time until the next turn is no step's."""
        self._asked_s = None

    def on_residuals_needed(self) -> None:
        """The turn could use its residuals now."""
        if not self._needed and self._asked_s is not None:
            self._needed = True
            self._encoder_s = _smoothed(self._encoder_s, self._clock() - self._asked_s)

    def allows(self, control: ControlInput, *, answer_s: float, transfer_s: float) -> bool:
        """Whether its steps go on with the residuals of the step before. answer_s, transfer_s: see ServerLink."""
        similarity = control.hosts.similarity
        if not control.may_be_stale or similarity is None:
            return False
        return pipelines(
            similarity, answer_s=answer_s, transfer_s=transfer_s, encoder_s=self._encoder_s, step_s=self._step_s
        )


def _smoothed(before: float, now: float) -> float:
    return now if before == 0.0 else before + _WEIGHT * (now - before)
