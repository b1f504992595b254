"""A simulated fleet of workers: what edits take there, by the balancer that decides where they go.

Turns take what was measured of the bench model. Each worker forms its groups with the engine's own Batcher; what it has
to load, it loads beside them, by the exact plan. The balancers are the gateway's policy, and two that bind every edit
when it comes.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

from bottega.addons.edits.engine.times import WorkFit
from bottega.addons.edits.planning import BlockCost, plan_steps
from bottega.engine.batcher import Batcher
from bottega.engine.engine import Engine
from bottega.engine.limits import EngineLimits
from bottega.gateway.scheduling.policy import PendingJob, assign
from bottega.gateway.scheduling.worker_plan import Findings, ResourceRequest, WorkerState
from bottega.model.rows import GroupKey
from bottega.planning import RowFractions, Shape, StepTimes, rounded_share
from load.bench.edit_queue import EditDesk
from load.bench.engine_runs import run_orders

_SHARES = (0.02, 0.05, 0.11, 0.19, 0.27, 0.35, 0.5, 0.7)
_WIDTHS = (1, 2, 3, 4, 6)
_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCosts:
    """The seconds of turns by their rows."""

    turn_s: float
    """Seconds of any turn."""
    row_s: float
    """Seconds of each plain row in it."""
    fixed_share: float
    """Share of a row's seconds that does not shrink with its tokens."""
    encode_s: float
    decode_s: float
    """Seconds of an edit before its first turn, and after its last one."""
    r2: float
    """Quality of the fit, over turns that were held out of it."""

    def row_equivalents(self, share: float) -> float:
        """Return the plain rows that cost as much as one of which this share of the tokens is computed."""
        return self.fixed_share + (1.0 - self.fixed_share) * share

    def seconds(self, row_equivalents: float) -> float:
        """Return the seconds of a turn."""
        return self.turn_s + self.row_s * row_equivalents


def measured_costs(model: Path, *, threads: int, rounds: int) -> TurnCosts:
    """Fit the costs of turns to an engine in this process.

    A row of which a part is computed costs a fixed share of a plain one, and the rest in proportion to that part: a
    linear regression over turns of many compositions gives that share.
    """
    desk = EditDesk(model, steps=(_STEPS,), threads=threads)
    engine = desk.engine(EngineLimits(max_rows=2 * max(_WIDTHS), max_wait_turns=0))  # all that are here share a turn
    desk.record(engine)
    chance = random.Random("scheduling costs")
    turns: dict[tuple[int, float], list[float]] = {}
    for number in range(rounds):
        for width in _WIDTHS:
            for first in range(len(_SHARES)):
                shares = [_SHARES[(first + 3 * place) % len(_SHARES)] for place in range(width)]
                for place, share in enumerate(shares):
                    engine.submit(desk.order(f"{number}-{width}-{first}-{place}", share, chance, _STEPS))
                rows, tokens, seconds = _turn(engine)
                turns.setdefault((rows, round(tokens, 6)), []).append(seconds)
    fit = WorkFit()
    for (rows, tokens), taken_s in turns.items():
        # The tokens stand for the operations, and the rows for the bytes that each moves, however much is masked.
        fit.observe(flops=tokens, size_bytes=float(rows), seconds=median(taken_s))
    cost = fit.cost
    assert cost is not None
    row_s = cost.per_flop_s + cost.per_byte_s
    return TurnCosts(
        turn_s=cost.fixed_s,
        row_s=row_s,
        fixed_share=cost.per_byte_s / row_s,
        encode_s=engine.fixed_s / 2,
        decode_s=engine.fixed_s / 2,
        r2=fit.r2 or 0.0,
    )


def _turn(engine: Engine) -> tuple[int, float, float]:
    """Draw everything; return rows, computed tokens (in rows) and seconds of the last turn that all of it shared."""
    seen: list[tuple[int, float, float]] = []
    predict = engine._denoiser.predict

    def timed(rows):  # type: ignore[no-untyped-def]
        prediction = predict(rows)
        tokens = sum(1.0 if row.activations is None else row.activations.share for row in rows)
        seen.append((len(rows), tokens, prediction.seconds))
        return prediction

    engine._denoiser.predict = timed  # type: ignore[method-assign]
    try:
        run_orders(engine, [])
    finally:
        engine._denoiser.predict = predict  # type: ignore[method-assign]
    most = max(rows for rows, _, _ in seen)
    return next(turn for turn in reversed(seen) if turn[0] == most)


SHAPE = (64, 64)
ROWS = 2
MAX_ROWS = 16
_KEY = GroupKey(shape=(4, *SHAPE), tokens=77, dtype=torch.float32)
# Planned blocks, all alike.
_BLOCKS = 24
# Templates in a worker's memory.
_TEMPLATES = 32


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedEdit:
    """A request of the Batcher."""

    number: int
    at_s: float
    computed_share: float
    """Share of its tokens that is computed."""
    template: int
    steps: int
    steps_left: int = 0
    loads: bool = False
    """Whether its template is loaded."""
    begun: bool = False
    ended_s: float = 0.0
    key: GroupKey = _KEY
    row_count: int = ROWS
    packs: bool = False

    def __post_init__(self) -> None:
        self.steps_left = self.steps

    @property
    def evaluations(self) -> int:
        return self.steps

    @property
    def evaluations_left(self) -> int:
        return self.steps_left


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCosts:
    """The seconds of turns, with loads beside them."""

    turns: TurnCosts
    load_share: float = 0.8
    """Seconds of loading a whole row, over those of computing it."""

    def turn_s(self, group: Sequence[SimulatedEdit]) -> float:
        """Return the seconds of one turn."""
        rows = sum(edit.row_count * self.turns.row_equivalents(edit.computed_share) for edit in group)
        loaded = sum(edit.row_count for edit in group if edit.loads)
        if not loaded:
            return self.turns.seconds(rows)
        return self.loading_s(round(4 * rows) / 4, sum(edit.row_count for edit in group), loaded)

    @functools.cache  # noqa: B019 - one for a run
    def loading_s(self, row_equivalents: float, rows: int, loaded: int) -> float:
        """Return the seconds of one turn, some rows of which load what they do not compute: the exact plan's end."""
        full, masked = self.turns.seconds(rows) / _BLOCKS, self.turns.seconds(row_equivalents) / _BLOCKS
        load = self.load_share * self.turns.row_s * loaded / _BLOCKS
        blocks = [BlockCost(name="", full_s=full, masked_s=masked, load_s=load)] * _BLOCKS
        return plan_steps([blocks], most_states=None)[0].compute_s

    def times(self) -> StepTimes:
        """Return the seconds of plain rows, as workers report them."""
        return StepTimes.from_entries((SHAPE, rows, self.turns.seconds(rows)) for rows in (1, 2, 4, 8, 16))

    def fractions(self) -> RowFractions:
        """Return the cost of masked rows, as parts of a plain row's own cost."""
        return RowFractions.from_entries([(SHAPE, self.turns.fixed_share)])


class Balancer(Protocol):
    """Decides where edits go."""

    def arrived(self, edit: SimulatedEdit, now_s: float) -> None:
        """Take an edit that comes."""

    def changed(self, worker: SimulatedWorker, now_s: float) -> None:
        """Note that a worker has made a turn."""


class SimulatedWorker:
    """A worker with its edits and the templates in its memory."""

    def __init__(self, name: str, costs: FleetCosts) -> None:
        self.name = name
        self.here: dict[int, SimulatedEdit] = {}
        self.templates: OrderedDict[int, None] = OrderedDict()
        self.turns = 0
        self.busy = False
        self._costs = costs
        self._batcher: Batcher[SimulatedEdit] = Batcher(
            costs.times(), costs.fractions(), max_rows=MAX_ROWS, max_wait_turns=8
        )

    def take(self, edit: SimulatedEdit) -> None:
        """Add an edit."""
        edit.loads = edit.template not in self.templates
        self.here[edit.number] = edit
        self._batcher.add(edit)

    def turn(self) -> tuple[float, list[SimulatedEdit]]:
        """Make the next turn; return its seconds, and the edits whose last step it was."""
        self.turns += 1
        group = self._batcher.next_turn().requests
        seconds = self._costs.turn_s(group)
        ended = []
        for edit in group:
            seconds += 0.0 if edit.begun else self._costs.turns.encode_s
            edit.begun = True
            edit.steps_left -= 1
            if not edit.steps_left:
                seconds += self._costs.turns.decode_s
                ended.append(edit)
        return seconds, ended

    def finish(self, edit: SimulatedEdit) -> None:
        """End an edit; its template stays in memory."""
        del self.here[edit.number]
        self._batcher.remove(edit)
        self.templates[edit.template] = None
        self.templates.move_to_end(edit.template)
        if len(self.templates) > _TEMPLATES:
            self.templates.popitem(last=False)


@dataclass(order=True, slots=True)
class _Event:
    at_s: float
    number: int
    act: Callable[[float], None] = field(compare=False)


class SimulatedFleet:
    """Runs edits to their ends, on a clock that jumps from event to event. A balancer gives them to workers."""

    def __init__(self, workers: int, costs: FleetCosts) -> None:
        self.costs = costs
        self.workers = [SimulatedWorker(f"w{number}", costs) for number in range(workers)]
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._balancer: Balancer | None = None

    def run(self, edits: Sequence[SimulatedEdit], balancer: Balancer) -> list[float]:
        """Return the seconds that each edit took from its arrival."""
        self._balancer = balancer
        for edit in edits:
            self.at(edit.at_s, functools.partial(balancer.arrived, edit))
        while self._events:
            event = heapq.heappop(self._events)
            event.act(event.at_s)
        return [edit.ended_s - edit.at_s for edit in edits]

    def at(self, at_s: float, act: Callable[[float], None]) -> None:
        """Call a function at that time."""
        heapq.heappush(self._events, _Event(at_s, next(self._numbers), act))

    def give(self, worker: SimulatedWorker, edit: SimulatedEdit, now_s: float) -> None:
        """Give a worker an edit."""
        worker.take(edit)
        if not worker.busy:
            self._turn(worker, now_s)

    def _turn(self, worker: SimulatedWorker, now_s: float) -> None:
        seconds, ended = worker.turn()
        worker.busy = True
        self.at(now_s + seconds, functools.partial(self._turned, worker, ended))

    def _turned(self, worker: SimulatedWorker, ended: list[SimulatedEdit], now_s: float) -> None:
        assert self._balancer is not None
        worker.busy = False
        for edit in ended:
            edit.ended_s = now_s
            worker.finish(edit)
        self._balancer.changed(worker, now_s)
        if worker.here and not worker.busy:
            self._turn(worker, now_s)


# Between two looks of the scheduler for the sake of progress.
_PAUSE_S = 0.015
# Widths outlive so many states, as in the snapshot.
_KEPT_WIDTHS = 16


class RequestCount:
    """A balancer that binds each edit at once to the worker that has the fewest."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet

    def arrived(self, edit: SimulatedEdit, now_s: float) -> None:
        """Bind the edit."""
        self._fleet.give(min(self._fleet.workers, key=self.load), edit, now_s)

    def changed(self, worker: SimulatedWorker, now_s: float) -> None:
        """Do nothing, as no edit waits here."""

    def load(self, worker: SimulatedWorker) -> float:
        """Return the load by which workers are compared."""
        return len(worker.here)


class MaskedTokens(RequestCount):
    """A balancer that binds each edit to the worker that has the fewest masked tokens to compute, steps counted."""

    def load(self, worker: SimulatedWorker) -> float:
        return sum(edit.computed_share * edit.steps_left for edit in worker.here.values())


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The state of a worker when it was last looked at."""

    state: WorkerState
    turns: int
    edits: tuple[int, ...]
    age: int


class Policy:
    """The gateway's policy: edits wait until a worker has slack, and go where they are expected to complete first."""

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
        """Look at the queue at once."""
        self._waiting.append(edit)
        self._look(now_s)

    def changed(self, worker: SimulatedWorker, now_s: float) -> None:
        """Look at the queue soon."""
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
        """Return the seconds that loads add to its turns, as ActivationsAddOn computes them."""
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
