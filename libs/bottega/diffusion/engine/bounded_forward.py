"""Forwards within the device's memory: groups that do not fit run in parts, down to row by row.

What a part computes is what the whole group would have, but for the last bits of sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from bottega.diffusion.device.device import Device
from bottega.diffusion.device.memory_plan import MemoryPlan
from bottega.diffusion.device.out_of_memory import is_out_of_memory
from bottega.diffusion.device.span import Span
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.engine.times import ForwardTimes
from bottega.diffusion.heartbeat import Heartbeat
from bottega.diffusion.rows import Row

# Kinds of forwards that are remembered as run before; of more, each is taken for new.
_MOST_KINDS = 4096

# The larger one tells what a row needs beside what is needed once; both are at least a guided request's.
_MEASURED_ROWS = (1, 2)


class Forward(Protocol):
    """What predicts noise for groups of rows, see Denoiser."""

    def predict(self, rows: Sequence[Row]) -> Prediction: ...
    def ask_ahead(self, rows: Sequence[Row]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """The times of forwards one behind the other."""

    times: Sequence[ForwardTimes]

    @property
    def ready(self) -> bool:
        return all(each.ready for each in self.times)

    def wait(self) -> None:
        for each in self.times:
            each.wait()

    @property
    def waits(self) -> Sequence[Span]:
        return [wait for each in self.times for wait in each.waits]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.times)

    @property
    def waited_s(self) -> float:
        return sum(each.waited_s for each in self.times)

    @property
    def encoder_s(self) -> float:
        return sum(each.encoder_s for each in self.times)


class BoundedForward:
    """Forwards of groups of rows, in parts where all of a group does not fit.

    Args:
        forward: Runs what fits.
        memory: Says what does.
        decoded_area: Of a latent of so many elements, how many are decoded at once.
        splits: Whether parts need less than the whole group.
        heartbeat: Beats while the first forward of a kind runs, which may compile.
        compile_s: For which it beats at most; 0 where nothing compiles.
    """

    def __init__(
        self,
        forward: Forward,
        memory: MemoryPlan,
        *,
        decoded_area: Callable[[int], int] = lambda area: area,
        splits: bool = True,
        heartbeat: Heartbeat | None = None,
        compile_s: float = 0.0,
    ) -> None:
        self._forward = forward
        self._memory = memory
        self._decoded_area = decoded_area
        self._splits = splits
        self._heartbeat = heartbeat or Heartbeat()
        self._compile_s = compile_s
        self._run_before: set[tuple[object, ...]] = set()

    def predict(self, rows: Sequence[Row]) -> Prediction:
        """Predict as Denoiser.predict does, in parts if all rows together do not fit.

        Raise torch.OutOfMemoryError, or the device's equivalent, if not even one row fits.
        """
        area, most = _area(rows), None
        if self._splits:
            most = self._memory.most_rows(area, decoded_area=self._decoded_area(area))
        most = most or len(rows)
        parts = [rows[begin : begin + most] for begin in range(0, len(rows), most)]
        return _joined(rows, [each for part in parts for each in self._fitting(part)])

    def ask_ahead(self, rows: Sequence[Row]) -> None:
        self._forward.ask_ahead(rows)

    def measure_memory(self, row: Row, device: Device) -> None:
        """Tells the plan what forwards of rows like this one need. At start, while nothing else runs."""
        if self._memory.budget_bytes is None:
            return
        for count in _MEASURED_ROWS:
            rows = [replace(row) for _ in range(count)]
            peak_bytes = device.measure_peak(partial(self._forward.predict, rows))
            self._memory.observe_forward(_area(rows), count, peak_bytes)

    def covered(self, kind: tuple[object, ...]) -> AbstractContextManager[None]:
        """Around what the device runs: has the heart go on where it is the first of its kind."""
        if not self._compile_s or kind in self._run_before:
            return nullcontext()
        if len(self._run_before) < _MOST_KINDS:
            self._run_before.add(kind)
        return self._heartbeat.covering(self._compile_s)

    def _fitting(self, rows: Sequence[Row]) -> Iterator[Prediction]:
        """One forward, or those of its halves where it finds no memory."""
        prediction = self._tried(rows)
        if prediction is not None:
            yield prediction
            return
        self._memory.note_out_of_memory(_area(rows), len(rows))
        half = len(rows) // 2
        yield from self._fitting(rows[:half])
        yield from self._fitting(rows[half:])

    def _tried(self, rows: Sequence[Row]) -> Prediction | None:
        """One forward; None where there was no memory for it, and it can be split."""
        try:
            with self.covered(_kind(rows)):
                return self._forward.predict(rows)
        except Exception as error:
            if not (self._splits and len(rows) > 1 and is_out_of_memory(error)):
                raise
        # Here and not above: the error is gone, and with it the frames that hold what the forward had computed.
        return None


def _area(rows: Sequence[Row]) -> int:
    """Elements of a row's latent in height and width."""
    _, height, width = rows[0].sample.shape
    return height * width


def _kind(rows: Sequence[Row]) -> tuple[object, ...]:
    """What a compiler tells forwards apart by."""
    masked = any(row.activations is not None for row in rows)
    controlled = any(row.controls for row in rows)
    return rows[0].sample.shape, len(rows), rows[0].embeds.prompt.shape, masked, controlled


def _joined(rows: Sequence[Row], parts: Sequence[Prediction]) -> Prediction:
    """What these parts predicted of the rows; an owner of whom a row was late is late with all of them."""
    if len(parts) == 1:
        return parts[0]
    noise = {row: predicted for part in parts for row, predicted in part.noise.items()}
    missing = Counter(row.owner for row in rows) - Counter(row.owner for row in noise)
    return Prediction(
        noise={row: noise[row] for row in rows if row.owner not in missing},
        times=_Parts(times=[part.times for part in parts]),
        blocks_reused={row: count for part in parts for row, count in part.blocks_reused.items()},
        load_waits_s={row: seconds for part in parts for row, seconds in part.load_waits_s.items()},
    )
