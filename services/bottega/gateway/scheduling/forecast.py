"""When pending jobs are expected to complete, by the plans of the scheduling policy. Pure, as that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bottega.gateway.scheduling.policy import ResourceRequest, WorkerPlan, WorkerState


class QueueForecast:
    """When each pending job would complete if nobody came any more: the least loaded worker takes the next one.

    For what callers are told, and for deadlines; it assigns nothing.
    """

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        measured = not all(worker.unmeasured for worker in workers)
        self._plans = [WorkerPlan(worker) for worker in workers] if measured else []
        self._loads_s = [plan.load_s for plan in self._plans]
        self._lines: list[list[int]] = [[] for _ in self._plans]
        self._size = 0

    @property
    def size(self) -> int:
        """How many jobs were added."""
        return self._size

    def add(self, request: ResourceRequest) -> None:
        """Adds one job, last."""
        if self._plans:
            least = self._least_loaded()
            self._loads_s[least] += self._plans[least].alone_s(request)
            self._plans[least].add(request, bound=False)
            self._lines[least].append(self._size)
        self._size += 1

    def next_completion_s(self, request: ResourceRequest) -> float | None:
        """Expected seconds until a job that came now would complete. None while nothing was measured."""
        if not self._plans:
            return None
        plan = self._plans[self._least_loaded()]
        return plan.completions_s(request)[-1] + plan.state.fixed_s

    def least_s(self, request: ResourceRequest) -> float | None:
        """Seconds of a job on the fastest worker and alone. None while that is not measured."""
        if not self._plans or any(plan.unmeasured(request) for plan in self._plans):
            return None
        return min(plan.alone_s(request) + plan.state.fixed_s for plan in self._plans)

    def completions_s(self) -> list[float | None]:
        """Expected seconds until each of the added jobs completes."""
        ends: list[float | None] = [None] * self._size
        for plan, line in zip(self._plans, self._lines, strict=True):
            if not line:
                continue
            for index, end_s in zip(line, plan.completions_s()[len(plan.state.running) :], strict=True):
                ends[index] = end_s + plan.state.fixed_s
        return ends

    def _least_loaded(self) -> int:
        return self._loads_s.index(min(self._loads_s))


def forecast(requests: Iterable[ResourceRequest], workers: Sequence[WorkerState]) -> list[float | None]:
    """Expected seconds until each of the pending jobs completes; None while nothing was measured."""
    queue = QueueForecast(workers)
    for request in requests:
        queue.add(request)
    return queue.completions_s()
