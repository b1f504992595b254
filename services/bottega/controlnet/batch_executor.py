"""The engine's compute thread: it computes the steps of all workers, in as few forward passes as possible.

Tenants share the device by seconds: a forward pass is led by the oldest step of the tenant that has used least for its
weight (`bottega.fair_order`), so one tenant's many rows delay another's few by the running forward pass at most. Rows
of one ControlNet and one shape share a forward pass, even if they come from different workers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega.addons.controlnets.engine import ControlRow, computes_one_session, run_group
from bottega.device.device import Device
from bottega.device.devices import CpuDevice
from bottega.device.memory_plan import MemoryPlan, is_out_of_memory
from bottega.engine.errors import to_job_failure
from bottega.errors import BottegaError
from bottega.fair_order import FairOrder, Share
from bottega.planning import StepTimes

# Upper bound on the ControlNets whose forward passes are remembered.
_MAX_TIMES = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """The residuals of one batch row: index `place` of each [rows, channels, height, width] tensor, at scale 1."""

    by_point: Sequence[Tensor]
    place: int
    shared: bool = False
    """Whether the row shared its forward pass with others (`computes_one_session`)."""


@dataclass(slots=True, kw_only=True, eq=False)
class StepRequest:
    """A denoising step of a worker: the rows whose residuals are to be computed.

    Args:
        owner: The connection that sent the step; see `drop_owner`.
        done: Called once, in the compute thread, when every row has its residuals or the step has failed.
        alone: Whether each of its sessions gets forward passes of its own, without padding.
    """

    owner: object
    rows: Sequence[ControlRow]
    done: Callable[[Sequence[Residuals] | BottegaError], None]
    residuals: dict[int, Residuals] = field(default_factory=dict)
    alone: bool = False
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
            return sum(len(work.rows) - len(work.residuals) for work in self._waiting)

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
            if not self._splits(group, error):
                self._retry_exclusively(group, error)
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
        by_point = run_group(rows, fixed_rows=fixed_rows)
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
        for place, (work, index) in enumerate(group):
            work.residuals[index] = Residuals(by_point=by_point, place=place, shared=shared)
        for work in dict.fromkeys(work for work, _ in group):
            if len(work.residuals) == len(work.rows):
                self._end(work, [work.residuals[index] for index in range(len(work.rows))])

    def _note_time(self, row: ControlRow, rows: int, seconds: float) -> None:
        name = row.session.net.name
        times = self.times[name] = self.times.pop(name) if name in self.times else StepTimes()  # moved to the end
        if len(self.times) > _MAX_TIMES:
            del self.times[next(iter(self.times))]
        _, height, width = row.sample.shape
        times.observe((height, width), rows, seconds)

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

    def _retry_exclusively(self, group: Sequence[tuple[StepRequest, int]], error: Exception) -> None:
        """Retry the steps of a failed forward pass one by one. A step that ran alone fails."""
        works = list(dict.fromkeys(work for work, _ in group))
        if len(works) > 1:
            _log.warning("a batch failed; its steps are retried one by one", extra={"why": type(error).__name__})
            for work in works:
                work.retried = True
            return
        self._end(works[0], to_job_failure(error))

    def _end(self, work: StepRequest, outcome: Sequence[Residuals] | BottegaError) -> None:
        with self._changed:
            if work not in self._waiting:
                return  # its connection has ended
            self._waiting.remove(work)
        work.done(outcome)


def _area(row: ControlRow) -> int:
    _, height, width = row.sample.shape
    return int(height * width)
