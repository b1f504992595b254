"""Predicts the noise of batches of rows, within the device's memory, and measures the time of every forward pass.

A batch that does not fit into memory is split, down to single rows. The result is that of the whole batch, except for
the last bits of sums.

On a GPU a forward pass is only enqueued, and its time is known one turn later. Before the next is enqueued, all but the
last one must be done, so that the engine's thread is at most one forward pass ahead of the device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from bottega.device.device import Device
from bottega.device.heartbeat import Heartbeat
from bottega.device.memory_plan import MemoryPlan, is_out_of_memory
from bottega.engine.addon import EngineAddOn
from bottega.engine.forward import Forward, Network, Prediction
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.engine.times import ForwardTimes, JoinedTimes
from bottega.model.model import Model
from bottega.model.packed import mixed_backbone
from bottega.model.rows import Row
from bottega.model.step_cache import StepCacheMemory
from bottega.planning import PackedTimes, RowFractions, Shape, StepTimes

# Number of kinds of forward passes that are remembered as compiled. Any further kind counts as new each time.
_MAX_KINDS = 4096
# Two measurements separate the memory per row from what is needed once. A guided request has two rows.
_MEASURED_ROWS = (1, 2)
# The warm-up measures larger batches until one takes this long; even larger ones are measured when they occur.
_WARM_UP_TURN_S = 1.0
# Rows of a guided request.
_LEAST_WARM_UP_ROWS = 2
# Number of forward passes that the device may not have finished when another one is enqueued.
_AHEAD = 1


class Denoiser:
    """Predicts the noise of batches of rows.

    Args:
        network: The blocks, LoRA weights and residuals that forward passes use.
        addons: Add-ons, which get the time of each forward pass.
        memory: Memory of the device.
        decoded_area: Returns how many elements may be decoded beside forward passes of latents of a given area.
        heartbeat: Sends heartbeats during the first forward pass of a kind, which may compile.
        compile_s: Upper bound on that time; 0 if nothing compiles.
    """

    def __init__(
        self,
        network: Network,
        *,
        addons: Sequence[EngineAddOn] = (),
        memory: MemoryPlan | None = None,
        decoded_area: Callable[[int], int] = lambda area: area,
        heartbeat: Heartbeat | None = None,
        compile_s: float = 0.0,
    ) -> None:
        self.step_times = StepTimes()
        """Measured times of forward passes of plain rows."""
        self.row_fractions = RowFractions()
        """Measured costs of partly computed rows, as fractions of the cost of plain rows."""
        self.packed_times = None if network.packed is None else PackedTimes(self.step_times)
        """Measured times of forward passes of plain rows with several sizes; None if the network cannot run them."""
        self._network = network
        self._fixed_rows = network.fixed_rows
        self._addons = addons
        self._memory = memory or MemoryPlan()
        self._decoded_area = decoded_area
        self._heartbeat = heartbeat or Heartbeat()
        self._compile_s = compile_s
        self._compiled: set[tuple[object, ...]] = set()
        self._unread: deque[tuple[Sequence[Row], ForwardTimes]] = deque()

    def predict(self, rows: Sequence[Row]) -> Prediction:
        """Predict the noise of rows that may share a forward pass, and use the times of finished ones.

        Raises:
            Unavailable: Residuals did not come within RESIDUAL_TIMEOUT_S.
            torch.OutOfMemoryError: Not even a single row fits; or the device's equivalent.
        """
        self._learn(_AHEAD)
        prediction = self._predict_in_parts(rows)
        whole = len(prediction.noise) == len(rows) and not prediction.reused
        self._unread.append((rows if whole else (), prediction.times))
        self._learn(len(self._unread))
        return prediction

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Prediction:
        """Run one forward pass that is neither split nor measured."""
        return Forward(self._network, rows).run()

    @torch.inference_mode()
    def ask_ahead(self, rows: Sequence[Row]) -> None:
        """Start the ControlNets for rows of a later forward pass."""
        controlled = [row for row in rows if row.controls]
        if controlled:
            self._network.residual_provider.ask_ahead(controlled)

    def cost(self, request: Request) -> float:
        """Return the cost of each of a request's rows in the next forward pass, as a fraction of a plain row's."""
        _, height, width = request.key.shape
        return self.row_fractions.fraction((height, width), request.computed_share)

    def covered(self, kind: tuple[object, ...]) -> AbstractContextManager[None]:
        """Return a context that sends heartbeats during the first work of a kind, which may compile."""
        if not self._compile_s or kind in self._compiled:
            return nullcontext()
        if len(self._compiled) < _MAX_KINDS:
            self._compiled.add(kind)
        return self._heartbeat.covering(self._compile_s)

    def measure_memory(self, row: Row, device: Device) -> None:
        """Measure the memory of forward passes with rows like this one, while nothing else runs."""
        if self._memory.budget_bytes is None:
            return
        for count in _MEASURED_ROWS:
            rows = [replace(row) for _ in range(count)]
            peak_bytes = device.measure_peak(partial(self.forward, rows))
            self._memory.observe_forward(_area(rows), count, peak_bytes)

    def warm_up(self, row: Row, max_rows: int) -> None:
        """Measure forward passes of 1, 2, 4, ... rows like this one until one takes a second, and the cost of add-ons.

        Two rows are always measured, because the cost of partly computed rows follows from both. A forward pass that
        takes a second is measured only once. With fixed rows all passes take equally long, and only one row is
        measured.
        """
        most = 1 if self._fixed_rows else max_rows
        count, slow = 1, False
        while count <= most and (count <= _LEAST_WARM_UP_ROWS or not slow):
            rows = [replace(row) for _ in range(count)]
            if not slow:  # The first forward pass of a size includes one-time work.
                slow = self._predict_in_parts(rows).seconds > _WARM_UP_TURN_S
            slow = max(self.predict(rows).seconds for _ in range(1 if slow else 3)) > _WARM_UP_TURN_S
            count *= 2
        for addon in self._addons:
            addon.warm_up(row, self.predict)

    def _predict_in_parts(self, rows: Sequence[Row]) -> Prediction:
        area, most = _area(rows), None
        if not self._fixed_rows:
            most = self._memory.most_rows(area, decoded_area=self._decoded_area(area))
        most = most or len(rows)
        parts = [rows[begin : begin + most] for begin in range(0, len(rows), most)]
        return _joined(rows, [prediction for part in parts for prediction in self._halved(part)])

    def _halved(self, rows: Sequence[Row]) -> Iterator[Prediction]:
        """Run one forward pass. If memory is short, run one for each half of the rows instead."""
        prediction = self._tried(rows)
        if prediction is not None:
            yield prediction
            return
        self._memory.note_out_of_memory(_area(rows), len(rows))
        half = len(rows) // 2
        yield from self._halved(rows[:half])
        yield from self._halved(rows[half:])

    def _tried(self, rows: Sequence[Row]) -> Prediction | None:
        """Run one forward pass; return None if memory is too short for it and the rows can be split."""
        try:
            with self.covered(_kind(rows)):
                return self.forward(rows)
        except Exception as error:
            if self._fixed_rows or len(rows) == 1 or not is_out_of_memory(error):
                raise
        # Outside the handler, the error is gone, and with it the frames that hold tensors of the forward pass.
        return None

    def _learn(self, ahead: int) -> None:
        """Record the times of finished forward passes, and wait for more while over `ahead` are not finished."""
        while self._unread and (len(self._unread) > ahead or self._unread[0][1].ready):
            rows, times = self._unread.popleft()
            if not rows:  # Some rows ran only a part of it.
                times.wait()
            elif any(row.activations is not None for row in rows):
                self._learn_masked(rows, times.seconds)
            else:
                self._learn_plain(rows, times.seconds)

    def _learn_plain(self, rows: Sequence[Row], seconds: float) -> None:
        counts = Counter(_shape([row]) for row in rows)
        if self.packed_times is not None and len(counts) > 1:
            plain_s = self.packed_times.seconds(counts)
            plain = [addon.after_forward(rows, seconds, plain_s, masked=False) for addon in self._addons]
            if all(plain):
                self.packed_times.observe(counts, seconds)
            return
        shape = _shape(rows)
        plain_s = self.step_times.seconds(shape, len(rows))
        plain = [addon.after_forward(rows, seconds, plain_s, masked=False) for addon in self._addons]
        if self._fixed_rows and rows[0].alone:
            return  # It was not padded, so its time says nothing about padded ones.
        if all(plain) or plain_s is None:
            # With padding, few rows take as long as many, even if some were measured while the machine was busy.
            self.step_times.observe(
                shape,
                max(len(rows), self._fixed_rows),
                seconds,
                fewest_rows=1 if self._fixed_rows else None,
            )

    def _learn_masked(self, rows: Sequence[Row], seconds: float) -> None:
        """Record the time of a forward pass with partly computed rows, which says nothing about plain rows."""
        for addon in self._addons:
            addon.after_forward(rows, seconds, None, masked=True)
        shares = [row.activations.share for row in rows if row.activations is not None and row.activations.reads]
        if shares:  # A forward pass that only records says nothing about fractions.
            self.row_fractions.observe(self.step_times, _shape(rows), rows=len(rows), shares=shares, seconds=seconds)


def open_denoiser(
    model: Model,
    limits: EngineLimits,
    addons: Sequence[EngineAddOn],
    heartbeat: Heartbeat,
    decoded_area: Callable[[int], int],
) -> Denoiser:
    """Return a denoiser of a model's backbone, with what add-ons change in it.

    Args:
        decoded_area: See `Denoiser`.
    """
    network = Network(
        backbone=model.backbone,
        packed=None if limits.fixed_rows else mixed_backbone(model.backbone),
        row_weights=next((addon.row_weights for addon in addons if addon.row_weights is not None), None),
        residuals=next((addon.residuals for addon in addons if addon.residuals is not None), None),
        strategies=[addon.strategy for addon in addons if addon.strategy is not None],
        fixed_rows=limits.fixed_rows,
        device=model.runtime,
        operations=model.operations,
        step_caches=StepCacheMemory(model.memory),
    )
    return Denoiser(
        network,
        addons=addons,
        memory=model.memory,
        decoded_area=decoded_area,
        heartbeat=heartbeat,
        compile_s=0.0 if model.device.type == "cpu" else limits.compile_s,
    )


def _shape(rows: Sequence[Row]) -> Shape:
    """Return the largest shape of the rows' latents, [height, width]."""
    largest = max(rows, key=lambda row: row.sample.numel())
    _, height, width = largest.sample.shape
    return height, width


def _area(rows: Sequence[Row]) -> int:
    height, width = _shape(rows)
    return height * width


def _kind(rows: Sequence[Row]) -> tuple[object, ...]:
    """Return a key that is equal for forward passes that share compiled code."""
    masked = any(row.activations is not None for row in rows)
    controlled = any(row.controls for row in rows)
    return tuple(row.size for row in rows), masked, controlled


def _joined(rows: Sequence[Row], parts: Sequence[Prediction]) -> Prediction:
    """Return one prediction made of those for parts of the rows.

    An owner with a late row in any part is late with all of its rows. An owner with rows in several parts was split.
    """
    if len(parts) == 1:
        return parts[0]
    places = Counter(owner for part in parts for owner in {row.owner for row in part.noise})
    noise = {row: predicted for part in parts for row, predicted in part.noise.items()}
    missing = Counter(row.owner for row in rows) - Counter(row.owner for row in noise)
    return Prediction(
        noise={row: noise[row] for row in rows if row.owner not in missing},
        times=JoinedTimes(parts=[part.times for part in parts]),
        shared=frozenset(owner for owner, count in places.items() if count > 1).union(*(part.shared for part in parts)),
        reused=frozenset().union(*(part.reused for part in parts)),
        blocks=parts[0].blocks,
        load_waits_s={row: seconds for part in parts for row, seconds in part.load_waits_s.items()},
    )
