"""Forwards on this worker, and what they take: the step times by which groups are formed and pairs share rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bottega.diffusion.engine.addon import EngineAddOn
from bottega.diffusion.engine.forward import Denoiser, Prediction
from bottega.diffusion.rows import Row
from bottega.planning import StepTimes

# The warm-up measures wider turns until one takes so long: the rest is learnt from real ones.
_WARM_UP_TURN_S = 1.0


class MeasuredForward:
    """Runs forwards and observes their times. addons: learn from them what their part of a forward takes."""

    def __init__(self, denoiser: Denoiser, step_times: StepTimes, addons: Sequence[EngineAddOn]) -> None:
        self.step_times = step_times
        self._denoiser = denoiser
        self._addons = addons

    def predict(self, rows: Sequence[Row]) -> Prediction:
        """A forward of these rows, see Denoiser.predict."""
        prediction = self._denoiser.predict(rows)
        if len(prediction.noise) == len(rows):  # else some of them ran only half of it
            _, height, width = rows[0].sample.shape
            plain_s = self.step_times.seconds((height, width), len(rows))
            plain = [addon.after_forward(rows, prediction.seconds, plain_s) for addon in self._addons]
            if all(plain) or plain_s is None:
                self.step_times.observe((height, width), len(rows), prediction.seconds)
        return prediction

    def ask_ahead(self, rows: Sequence[Row]) -> None:
        self._denoiser.ask_ahead(rows)

    def warm_up(self, row: Row, max_rows: int) -> None:
        """Measures forwards of 1, 2, 4, ... rows like this one until one takes a second, and what add-ons cost."""
        count = 1
        while count <= max_rows:
            rows = [replace(row) for _ in range(count)]
            self._denoiser.predict(rows)  # the first of its size pays for what is made once
            if max(self.predict(rows).seconds for _ in range(3)) > _WARM_UP_TURN_S:
                break
            count *= 2
        for addon in self._addons:
            addon.warm_up(row, self.predict)
