"""Who says where edits go: the gateway's policy, and two ways of balancing that bind every edit when it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bottega.gateway.scheduling.policy import PendingJob, assign
from bottega.gateway.scheduling.worker_plan import Findings, ResourceRequest, WorkerState
from bottega.planning import Shape, rounded_share
from load.bench.scheduling_fleet import MAX_ROWS, ROWS, SHAPE, SimulatedEdit, SimulatedFleet, SimulatedWorker

# As the scheduler's between two looks for the sake of progress.
_PAUSE_S = 0.015
# As the snapshot's: widths outlive so many states.
_KEPT_WIDTHS = 16


class RequestCount:
    """An edit goes to the worker that has the fewest."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet

    def arrived(self, edit: SimulatedEdit, now_s: float) -> None:
        """It is bound at once."""
        self._fleet.give(min(self._fleet.workers, key=self.load), edit, now_s)

    def changed(self, worker: SimulatedWorker, now_s: float) -> None:
        """Nothing waits here."""

    def load(self, worker: SimulatedWorker) -> float:
        """By which workers are compared."""
        return len(worker.here)


class MaskedTokens(RequestCount):
    """An edit goes to the worker that has the fewest masked tokens to compute, steps counted."""

    def load(self, worker: SimulatedWorker) -> float:
        return sum(edit.computed_share * edit.steps_left for edit in worker.here.values())


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The state of a worker as it was last made."""

    state: WorkerState
    turns: int
    edits: tuple[int, ...]
    age: int


class Policy:
    """The gateway's: edits wait until a worker has slack, and go where they are expected to complete first."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._times, self._fractions = fleet.costs.times(), fleet.costs.fractions()
        # What turns take is the same at all workers, and never changes.
        self._alone: dict[tuple[int, Shape, float], tuple[float, float]] = {}
        self._turns: dict[Shape, Callable[[float], float]] = {}
        self._waiting: deque[SimulatedEdit] = deque()
        self._seen: dict[str, _Seen] = {}
        self._by_name = {worker.name: worker for worker in fleet.workers}
        self._looked_at = 0.0
        self._due = False

    def arrived(self, edit: SimulatedEdit, now_s: float) -> None:
        """Looked at at once."""
        self._waiting.append(edit)
        self._look(now_s)

    def changed(self, worker: SimulatedWorker, now_s: float) -> None:
        """Looked at soon."""
        if self._waiting and not self._due:
            self._due = True
            self._fleet.at(max(now_s, self._looked_at + _PAUSE_S), self._look)

    def _look(self, now_s: float) -> None:
        self._due, self._looked_at = False, now_s
        states = [self._state(worker) for worker in self._fleet.workers]
        given = {each.job_id: each.worker for each in assign(self._pending(), states, waiting=len(self._waiting))}
        if not given:
            return
        gone = [edit for edit in self._waiting if str(edit.number) in given]
        for edit in gone:
            self._waiting.remove(edit)
            self._fleet.give(self._by_name[given[str(edit.number)]], edit, now_s)

    def _pending(self) -> Iterator[PendingJob]:
        for edit in self._waiting:
            request = _request(edit, edit.steps)
            longer_s = self._longer_s(edit)
            yield PendingJob(
                job_id=str(edit.number),
                request=request,
                load_s={
                    worker.name: longer_s
                    for worker in (self._fleet.workers if longer_s else ())
                    if edit.template not in worker.templates
                },
            )

    def _longer_s(self, edit: SimulatedEdit) -> float:
        """What all turns take longer where its template is loaded beside them, as ActivationsAddOn says it."""
        costs = self._fleet.costs
        rows = ROWS * costs.turns.row_equivalents(edit.computed_share)
        longer_s = costs.loading_s(round(4 * rows) / 4, ROWS, ROWS) - costs.turns.seconds(rows)
        return edit.steps * max(0.0, longer_s)

    def _state(self, worker: SimulatedWorker) -> WorkerState:
        seen, edits = self._seen.get(worker.name), tuple(worker.here)
        if seen is None or seen.turns != worker.turns or seen.edits != edits:
            same = seen is not None and seen.edits == edits and seen.age < _KEPT_WIDTHS
            findings = Findings(alone=self._alone, turns=self._turns)
            if seen is not None and same:
                findings.widths = seen.state.findings.widths
            seen = self._seen[worker.name] = _Seen(
                state=self._new_state(worker, findings),
                turns=worker.turns,
                edits=edits,
                age=seen.age + 1 if seen is not None and same else 0,
            )
        return seen.state

    def _new_state(self, worker: SimulatedWorker, findings: Findings) -> WorkerState:
        turns = self._fleet.costs.turns
        return WorkerState(
            worker=worker.name,
            running=tuple(_request(edit, edit.steps_left) for edit in worker.here.values() if edit.steps_left),
            times=self._times,
            fixed_s=turns.encode_s + turns.decode_s,
            max_rows=MAX_ROWS,
            fractions=self._fractions,
            findings=findings,
        )


def _request(edit: SimulatedEdit, steps: int) -> ResourceRequest:
    return ResourceRequest(rows=ROWS, steps=steps, shape=SHAPE, share=rounded_share(edit.computed_share))
