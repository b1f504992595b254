"""The engine's compute thread: it computes the steps of all workers, in as few forward passes as possible.

Tenants share the device by seconds: a forward pass is led by the oldest step of the tenant that has used least for its
weight (`bottega.fair_order`), so one tenant's many rows delay another's few by the running forward pass at most. Rows
of one ControlNet and one shape share a forward pass, even if they come from different workers.

Residuals of a transformer are handed out while the forward pass runs, one by one (`ResidualStream`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega.addons.controlnets.engine import ControlRow, computes_one_session, stream_group
from bottega.device.device import Device, Event
from bottega.device.devices import CpuDevice
from bottega.device.memory_plan import MemoryPlan, is_out_of_memory
from bottega.engine.errors import to_job_failure
from bottega.errors import BottegaError, DeadlineExceeded
from bottega.fair_order import FairOrder, Share
from bottega.planning import StepTimes

# Upper bound on the ControlNets whose forward passes are remembered.
_MAX_TIMES = 1024
_log = logging.getLogger(__name__)


class ResidualStream:
    """The residuals of a forward pass, which one thread computes and others wait for, at scale 1.

    The first dimension of each is the row.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._residuals: dict[int, tuple[Tensor, Event | None]] = {}
        self._error: BottegaError | None = None

    @property
    def by_point(self) -> Sequence[Tensor]:
        """The residuals by index, after the forward pass has ended."""
        return [self._residuals[point][0] for point in range(len(self._residuals))]

    @property
    def streamed_s(self) -> float:
        """Seconds in which the device computed the residuals after the first one; 0 if none were streamed.

        Waits until the device has computed the last one so far.
        """
        with self._changed:
            events = [computed for _, computed in self._residuals.values() if computed is not None]
        for event in events:
            event.wait()
        return events[-1].seconds_since(events[0]) if events else 0.0

    def add(self, point: int, residual: Tensor, computed: Event | None = None) -> None:
        """Add a residual.

        Args:
            point: Its index.
            residual: Of all rows.
            computed: When the device has computed it; None if it has.
        """
        with self._changed:
            self._residuals[point] = residual, computed
            self._changed.notify_all()

    def fail(self, error: BottegaError) -> None:
        """Let all who wait raise an error, because no further residual comes."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, point: int, timeout_s: float) -> Tensor:
        """Wait until a residual has been computed, and return it. Raise BottegaError if it never will be."""
        with self._changed:
            if not self._changed.wait_for(lambda: point in self._residuals or self._error is not None, timeout_s):
                raise DeadlineExceeded(f"residual {point} was not computed within {timeout_s:g} s")
            if point not in self._residuals:
                assert self._error is not None
                raise self._error
            residual, computed = self._residuals[point]
        if computed is not None:
            computed.wait()
        return residual


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """The residuals of one batch row: index `place` of each tensor in `stream`."""

    stream: ResidualStream
    place: int
    shared: bool = False
    """Whether the row shared its forward pass with others (`computes_one_session`)."""

    @property
    def by_point(self) -> Sequence[Tensor]:
        """The residuals of the forward pass by index, after it has ended. The first dimension is the row."""
        return self.stream.by_point


@dataclass(slots=True, kw_only=True, eq=False)
class StepRequest:
    """A denoising step of a worker: the rows whose residuals are to be computed.

    Args:
        owner: The connection that sent the step; see `drop_owner`.
        done: Called in the compute thread when every row has residuals, which may still be streamed, or with an error.
            It is called again, with the error, if the forward pass fails after that.
        alone: Whether each of its sessions gets forward passes of its own, without padding.
    """

    owner: object
    rows: Sequence[ControlRow]
    done: Callable[[Sequence[Residuals] | BottegaError], None]
    residuals: dict[int, Residuals] = field(default_factory=dict)
    alone: bool = False
    handed_out: bool = False
    """Whether `done` was called."""
    retried: bool = False
    """Whether a shared forward pass has failed, so that the step is now computed without other steps."""

    @property
    def shares(self) -> Iterator[Share]:
        """The tenants of its rows, with their weights."""
        return (row.session.share for row in self.rows)

    def key(self, index: int) -> Hashable:
        """Return the key that the rows of one forward pass must have in common."""
        row = self.rows[index]
        tokens = row.session.halves[row.half].prompt.shape
        own = (self, row.session) if self.alone else self if self.retried else None
        return row.session.batch_key, row.sample.shape, tokens, own


class BatchExecutor:
    """Computes steps. Any thread may call `submit`; one thread calls `run_batch` in a loop.

    `batches`, `rows` and `seconds` count its forward passes, their rows and their duration so far. `progress` counts
    forward passes and calls of `report_progress`. `times` has measured forward passes by ControlNet, for the thread
    that computes.

    Args:
        max_rows: Upper bound on the rows of a forward pass.
        fixed_rows: Number of rows to which every forward pass is padded; 0 turns padding off.
        device: Device that computes; None means the CPU.
        memory: Estimates how many rows fit, and is updated when a forward pass runs out of memory.
    """

    def __init__(
        self, *, max_rows: int, fixed_rows: int = 0, device: Device | None = None, memory: MemoryPlan | None = None
    ) -> None:
        self.batches = 0
        self.progress = 0
        self.rows = 0
        self.seconds = 0.0
        self.times: dict[str, StepTimes] = {}
        self._max_rows = fixed_rows or max_rows
        self._fixed_rows = fixed_rows
        self._device = device or CpuDevice()
        self._memory = memory or MemoryPlan()
        self._waiting: deque[StepRequest] = deque()
        self._order = FairOrder()
        self._changed = threading.Condition()
        self._woken = False

    @property
    def busy(self) -> bool:
        """Whether any step waits."""
        return bool(self._waiting)

    @property
    def queued_rows(self) -> int:
        """Number of waiting rows, including those in the running forward pass."""
        with self._changed:
            left = (len(work.rows) - (0 if work.handed_out else len(work.residuals)) for work in self._waiting)
            return sum(left)

    def submit(self, work: StepRequest) -> None:
        """Queue a step."""
        with self._changed:
            self._waiting.append(work)
            self._changed.notify()

    def wake(self) -> None:
        """End the current or the next wait of `run_batch`, because its thread has other work."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def report_progress(self) -> None:
        """Count progress of a running forward pass."""
        self.progress += 1

    def drop_owner(self, owner: object) -> None:
        """Drop the waiting steps of an owner. Running ones are finished."""
        with self._changed:
            self._waiting = deque(work for work in self._waiting if work.owner is not owner)

    def run_batch(self, timeout_s: float) -> None:
        """Run one forward pass, or wait at most `timeout_s` for a step or for `wake`.

        Raises the device's error if the device can compute nothing any more. The process then has to be replaced.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._woken, timeout_s)
            self._woken = False
            if not self._waiting:
                return
            group = self._group()
        try:
            self._run(group)
        except Exception as error:  # noqa: BLE001 - the boundary of a forward: the next one may succeed
            self._end_or_retry(group, error)
            # An error that broke the GPU's context affects all later steps. This call raises it.
            self._device.synchronize()

    def _group(self) -> list[tuple[StepRequest, int]]:
        """Return the first row of the next step, and the rows that can share its forward pass.

        Call it under the lock. Further rows of that step come first, then those of the others by arrival.
        """
        leader: Hashable = None
        max_rows = self._max_rows
        group: list[tuple[StepRequest, int]] = []
        leading = self._next_step()
        for work in (leading, *(work for work in self._waiting if work is not leading)):
            for index in range(len(work.rows)):
                if index in work.residuals:
                    continue
                key = work.key(index)
                if leader is None:
                    leader, max_rows = key, self._max_rows_with(work.rows[index])
                if key == leader and len(group) < max_rows:
                    group.append((work, index))
        return group

    def _next_step(self) -> StepRequest:
        """Return the oldest waiting step of the tenant that has used least of the device.

        A step with rows of several tenants counts as a step of the one that has used least, because the worker needs
        all of them for one forward pass.
        """
        tags = {share.tenant: self._order.next_tag(share.tenant) for work in self._waiting for share in work.shares}
        leading = min(self._waiting, key=lambda work: min(tags[share.tenant] for share in work.shares))
        self._order.served(min(tags[share.tenant] for share in leading.shares))
        return leading

    def _run(self, group: Sequence[tuple[StepRequest, int]]) -> None:
        began = self._device.record()
        rows = [work.rows[index] for work, index in group]
        fixed_rows = 0 if group[0][0].alone else self._fixed_rows
        shared = not computes_one_session(rows) or len(rows) < fixed_rows
        stream, streams = ResidualStream(), rows[0].session.net.streams
        outcome = [Residuals(stream=stream, place=place, shared=shared) for place in range(len(group))]
        for point, residual in stream_group(rows, fixed_rows=fixed_rows):
            stream.add(point, residual, self._device.record() if streams else None)
            if streams:
                self._hand_out(group, outcome)
        done = self._device.record()
        # Wait for this forward pass only, not for running loads and answers.
        done.wait()
        self.batches += 1
        self.report_progress()
        self.rows += len(group)
        seconds = done.seconds_since(began)
        self.seconds += seconds
        self._note_time(rows[0], max(len(rows), fixed_rows), seconds)
        for work, index in group:
            share = work.rows[index].session.share
            self._order.charge(share.tenant, cost=seconds / len(group), weight=share.weight)
        self._hand_out(group, outcome)
        with self._changed:
            self._waiting = deque(work for work in self._waiting if not work.handed_out)

    def _hand_out(self, group: Sequence[tuple[StepRequest, int]], outcome: Sequence[Residuals]) -> None:
        """Give the rows of a forward pass their residuals, and call `done` of steps all of whose rows have them."""
        for (work, index), residuals in zip(group, outcome, strict=True):
            work.residuals[index] = residuals
        with self._changed:
            waiting = set(map(id, self._waiting))  # the connections of others have ended
        for work in dict.fromkeys(work for work, _ in group if id(work) in waiting and not work.handed_out):
            if len(work.residuals) == len(work.rows):
                work.handed_out = True
                work.done([work.residuals[index] for index in range(len(work.rows))])

    def _end_or_retry(self, group: Sequence[tuple[StepRequest, int]], error: Exception) -> None:
        """End the steps of a failed forward pass that cannot be computed again, and keep the others waiting.

        Steps that were handed out fail, because their residuals were being sent. The others are retried: with fewer
        rows if memory was short, else one by one. A step that ran alone fails.
        """
        smaller = self._splits(group, error)
        works = list(dict.fromkeys(work for work, _ in group))
        withdrawn = [work.residuals.pop(index) for work, index in group if index in work.residuals]
        ended = [work for work in works if work.handed_out or (len(works) == 1 and not smaller)]
        if ended:
            failure = to_job_failure(error)
            for residuals in withdrawn:
                residuals.stream.fail(failure)
            for work in ended:
                self._end(work, failure)
        if len(ended) < len(works) and not smaller:
            _log.warning("a batch failed; its steps are retried one by one", extra={"why": type(error).__name__})
            for work in works:
                work.retried = True

    def _note_time(self, row: ControlRow, rows: int, seconds: float) -> None:
        name = row.session.net.name
        times = self.times[name] = self.times.pop(name) if name in self.times else StepTimes()  # moved to the end
        if len(self.times) > _MAX_TIMES:
            del self.times[next(iter(self.times))]
        times.observe(row.session.latent_size, rows, seconds)

    def _max_rows_with(self, row: ControlRow) -> int:
        """Return the largest number of rows that a forward pass with this row may have."""
        fitting = None if self._fixed_rows else self._memory.most_rows(_area(row), decoded_area=0)
        return self._max_rows if fitting is None else min(fitting, self._max_rows)

    def _splits(self, group: Sequence[tuple[StepRequest, int]], error: Exception) -> bool:
        """Return whether the device had too little memory and the next forward pass of these rows will be smaller."""
        row = group[0][0].rows[group[0][1]]
        if self._fixed_rows or len(group) == 1 or not is_out_of_memory(error):
            return False
        self._memory.note_out_of_memory(_area(row), len(group))
        return self._max_rows_with(row) < len(group)

    def _end(self, work: StepRequest, error: BottegaError) -> None:
        with self._changed:
            if work not in self._waiting:
                return  # its connection has ended
            self._waiting.remove(work)
        work.done(error)


def _area(row: ControlRow) -> int:
    height, width = row.session.latent_size
    return height * width
