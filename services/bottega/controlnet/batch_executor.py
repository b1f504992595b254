"""The engine's compute thread: it computes the steps of all links, in as few forwards as possible.

Tenants share the device by seconds: a forward is led by the oldest step of the tenant that has used least for its
weight (`bottega.fair_order`), so one tenant's many rows do not delay another's few by more than the running forward.
Rows of one ControlNet and one shape share a forward, even if they come from different workers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega.addons.controlnets.engine import ControlRow, computes_one_session, run_group
from bottega.device.cpu import CpuDevice
from bottega.device.device import Device
from bottega.device.memory_plan import MemoryPlan
from bottega.device.out_of_memory import is_out_of_memory
from bottega.engine.errors import to_job_failure
from bottega.errors import BottegaError
from bottega.fair_order import FairOrder, Share

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """The result of a forward for one row: index `place` of each [rows, channels, height, width] tensor, at scale 1."""

    by_point: Sequence[Tensor]
    place: int
    shared: bool = False
    """Whether the row was not computed alone (`computes_one_session`)."""


@dataclass(slots=True, kw_only=True, eq=False)
class StepRequest:
    """A step of a worker.

    Args:
        owner: The link that sent the step; see `drop_owner`.
        done: Called once, in the compute thread, when every row has its residuals or the step has failed.
        alone: Whether each of its sessions has forwards of its own, without padding.
    """

    owner: object
    rows: Sequence[ControlRow]
    done: Callable[[Sequence[Residuals] | BottegaError], None]
    residuals: dict[int, Residuals] = field(default_factory=dict)
    alone: bool = False
    retried: bool = False
    """Whether a forward that it shared has failed, so that it shares none with other steps."""

    @property
    def shares(self) -> Iterator[Share]:
        """The tenants of its rows."""
        return (row.session.share for row in self.rows)

    def key(self, index: int) -> Hashable:
        """Return the key that rows of one forward must share."""
        row = self.rows[index]
        tokens = row.session.halves[row.half].prompt.shape
        own = (self, row.session) if self.alone else self if self.retried else None
        return row.session.net, row.sample.shape, tokens, own


class BatchExecutor:
    """Computes steps. Any thread may call `submit`; one thread calls `run_batch` in a loop.

    `batches`, `rows` and `seconds` count its work so far. `progress` counts signs of life: forwards, and calls of
    `report_progress`.

    Args:
        max_rows: Maximum number of rows of a forward.
        fixed_rows: Pads every forward to this many rows; 0 is off.
        device: Device that computes; default is the CPU.
        memory: Estimates how many rows fit, and learns from forwards that ran out of memory.
    """

    def __init__(
        self, *, max_rows: int, fixed_rows: int = 0, device: Device | None = None, memory: MemoryPlan | None = None
    ) -> None:
        self.batches = 0
        self.progress = 0
        self.rows = 0
        self.seconds = 0.0
        self._max_rows = fixed_rows or max_rows
        self._fixed_rows = fixed_rows
        self._device = device or CpuDevice()
        self._memory = memory or MemoryPlan()
        self._waiting: deque[StepRequest] = deque()
        self._order = FairOrder()
        self._changed = threading.Condition()

    @property
    def busy(self) -> bool:
        """Whether any step waits."""
        return bool(self._waiting)

    def submit(self, work: StepRequest) -> None:
        """Queue a step."""
        with self._changed:
            self._waiting.append(work)
            self._changed.notify()

    def report_progress(self) -> None:
        """Count progress of a running forward."""
        self.progress += 1

    def drop_owner(self, owner: object) -> None:
        """Drop the waiting steps of an owner. Running ones are finished."""
        with self._changed:
            self._waiting = deque(work for work in self._waiting if work.owner is not owner)

    def run_batch(self, timeout_s: float) -> None:
        """Run one forward, or wait at most `timeout_s` for a step.

        Raises the device's error if it can compute nothing any more. The process then has to be replaced.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout_s):
                return
            group = self._group()
        try:
            self._run(group)
        except Exception as error:  # noqa: BLE001 - the boundary of a forward: the next one may succeed
            if not self._splits(group, error):
                self._retry_exclusively(group, error)
            # An error that broke the GPU's context would affect all later steps, too. This call raises it.
            self._device.synchronize()

    def _group(self) -> list[tuple[StepRequest, int]]:
        """Return the first row of the step that is next, and the rows that can share its forward.

        Call it under the lock. The group is filled with rows of the leading step, then of the others by arrival.
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

        A step with rows of several tenants counts as a step of the one that has used least: a worker has put them into
        one turn, which ends with the last of its rows.
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
        # Wait for this forward only: loads and answers under way do not delay it.
        done.wait()
        self.batches += 1
        self.report_progress()
        self.rows += len(group)
        seconds = done.seconds_since(began)
        self.seconds += seconds
        for work, index in group:
            share = work.rows[index].session.share
            self._order.charge(share.tenant, cost=seconds / len(group), weight=share.weight)
        for place, (work, index) in enumerate(group):
            work.residuals[index] = Residuals(by_point=by_point, place=place, shared=shared)
        for work in dict.fromkeys(work for work, _ in group):
            if len(work.residuals) == len(work.rows):
                self._end(work, [work.residuals[index] for index in range(len(work.rows))])

    def _max_rows_with(self, row: ControlRow) -> int:
        """Return the maximum number of rows of a forward with this one."""
        fitting = None if self._fixed_rows else self._memory.most_rows(_area(row), decoded_area=0)
        return self._max_rows if fitting is None else min(fitting, self._max_rows)

    def _splits(self, group: Sequence[tuple[StepRequest, int]], error: Exception) -> bool:
        """Return whether the device had too little memory, and the rows' next forward will be smaller."""
        row = group[0][0].rows[group[0][1]]
        if self._fixed_rows or len(group) == 1 or not is_out_of_memory(error):
            return False
        self._memory.note_out_of_memory(_area(row), len(group))
        return self._max_rows_with(row) < len(group)

    def _retry_exclusively(self, group: Sequence[tuple[StepRequest, int]], error: Exception) -> None:
        """Retry the steps of a failed forward one by one. A step that ran alone has failed."""
        works = list(dict.fromkeys(work for work, _ in group))
        if len(works) > 1:
            _log.warning("a forward failed; its steps are tried one by one", extra={"why": type(error).__name__})
            for work in works:
                work.retried = True
            return
        self._end(works[0], to_job_failure(error))

    def _end(self, work: StepRequest, outcome: Sequence[Residuals] | BottegaError) -> None:
        with self._changed:
            if work not in self._waiting:
                return  # its owner has gone
            self._waiting.remove(work)
        work.done(outcome)


def _area(row: ControlRow) -> int:
    _, height, width = row.sample.shape
    return int(height * width)
