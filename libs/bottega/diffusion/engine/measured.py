"""Forwards on this worker, and what they take: the step times by which groups are formed and pairs share rows.

On a GPU a forward is enqueued, and its time is known a turn later. So that the thread is never further ahead than that,
the forward before the last has to be done before the next one is enqueued: the device has the last one meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from bottega.diffusion.engine.addon import EngineAddOn
from bottega.diffusion.engine.bounded_forward import Forward
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.engine.request import Request
from bottega.diffusion.engine.times import ForwardTimes
from bottega.diffusion.rows import Row
from bottega.planning import RowFractions, StepTimes

# The warm-up measures wider turns until one takes so long: the rest is learnt from real ones.
_WARM_UP_TURN_S = 1.0
# Forwards that the device may not have finished when another one is enqueued.
_AHEAD = 1
# Of a guided request.
_LEAST_WARM_UP_ROWS = 2


class MeasuredForward:
    """Runs forwards and observes their times. addons: learn from them what their part of a forward takes.

    step_times: of plain rows. fractions: what rows cost of which a part is computed. fixed_rows: every
    forward is padded to so many; 0 where none is.
    """

    def __init__(
        self,
        forward: Forward,
        step_times: StepTimes,
        addons: Sequence[EngineAddOn],
        fractions: RowFractions | None = None,
        *,
        fixed_rows: int = 0,
    ) -> None:
        self.step_times = step_times
        self._fractions = fractions or RowFractions()
        self._fixed_rows = fixed_rows
        self._forward = forward
        self._addons = addons
        self._unread: deque[tuple[Sequence[Row], ForwardTimes]] = deque()

    def predict(self, rows: Sequence[Row]) -> Prediction:
        """A forward of these rows, see Denoiser.predict. Learns from those before it that the device has finished."""
        self._learn(_AHEAD)
        prediction = self._forward.predict(rows)
        self._unread.append((rows if len(prediction.noise) == len(rows) else (), prediction.times))
        self._learn(len(self._unread))
        return prediction

    def _learn(self, ahead: int) -> None:
        """From the forwards that are done; waits for them where more than so many are not."""
        while self._unread and (len(self._unread) > ahead or self._unread[0][1].ready):
            rows, times = self._unread.popleft()
            if not rows:  # some of them ran only half of it
                times.wait()
            elif any(row.activations is not None for row in rows):
                self._learn_masked(rows, times.seconds)
            else:
                self._learn_plain(rows, times.seconds)

    def cost(self, request: Request) -> float:
        """What each of a request's rows costs in the next turn, as a fraction of a plain one."""
        _, height, width = request.key.shape
        return self._fractions.fraction((height, width), request.computed_share)

    def ask_ahead(self, rows: Sequence[Row]) -> None:
        self._forward.ask_ahead(rows)

    def _learn_plain(self, rows: Sequence[Row], seconds: float) -> None:
        _, height, width = rows[0].sample.shape
        plain_s = self.step_times.seconds((height, width), len(rows))
        plain = [addon.after_forward(rows, seconds, plain_s) for addon in self._addons]
        if all(plain) or plain_s is None:
            # Padded, few rows take what many take, whatever was measured of some of them on a busy machine.
            self.step_times.observe(
                (height, width),
                max(len(rows), self._fixed_rows),
                seconds,
                fewest_rows=1 if self._fixed_rows else None,
            )

    def _learn_masked(self, rows: Sequence[Row], seconds: float) -> None:
        """A turn with masked rows is none of so many plain ones. One that only records says nothing of fractions."""
        for addon in self._addons:
            addon.after_masked_forward(rows, seconds)
        shares = [row.activations.share for row in rows if row.activations is not None and row.activations.recorded]
        if shares:
            _, height, width = rows[0].sample.shape
            self._fractions.observe(self.step_times, (height, width), rows=len(rows), shares=shares, seconds=seconds)

    def warm_up(self, row: Row, max_rows: int) -> None:
        """Measure forwards of 1, 2, 4, ... rows like this one until one takes a second, and what add-ons cost.

        Two rows are measured in any case, because what parts of rows cost follows from both. A forward that takes a
        second is measured once. Padded forwards are all alike: those of one row are measured.
        """
        most = 1 if self._fixed_rows else max_rows
        count, slow = 1, False
        while count <= most and (count <= _LEAST_WARM_UP_ROWS or not slow):
            rows = [replace(row) for _ in range(count)]
            if not slow:  # the first of its size pays for what is made once
                slow = self._forward.predict(rows).seconds > _WARM_UP_TURN_S
            slow = max(self.predict(rows).seconds for _ in range(1 if slow else 3)) > _WARM_UP_TURN_S
            count *= 2
        for addon in self._addons:
            addon.warm_up(row, self.predict)
