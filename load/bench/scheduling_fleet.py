"""A fleet of workers on a clock that jumps from event to event: what edits take there, by who says where they go.

Each worker forms its groups with the engine's own Batcher, and its turns take what the fitted costs say; what it has to
load, it loads beside them, by the exact plan. Who says where edits go is the matter of a `Balancer`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bottega.addons.edits.planning.block_loading import BlockCost, plan_step
from bottega.diffusion.engine.batcher import Batcher
from bottega.diffusion.rows import GroupKey
from bottega.planning import RowFractions, StepTimes
from load.bench.scheduling_costs import TurnCosts

SHAPE = (64, 64)
ROWS = 2
MAX_ROWS = 16
_KEY = GroupKey(shape=(4, *SHAPE), tokens=77, dtype=torch.float32)
# Blocks that are planned, all alike.
_BLOCKS = 24
# Templates in a worker's memory.
_TEMPLATES = 32


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedEdit:
    """A request of the Batcher. share: of its tokens, what is computed. loads: whether its template is loaded."""

    number: int
    at_s: float
    computed_share: float
    template: int
    steps: int
    steps_left: int = 0
    loads: bool = False
    begun: bool = False
    ended_s: float = 0.0
    key: GroupKey = _KEY
    row_count: int = ROWS

    def __post_init__(self) -> None:
        self.steps_left = self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCosts:
    """turns: fitted. load_share: seconds that loading a whole row takes, over those that computing it takes."""

    turns: TurnCosts
    load_share: float = 0.8

    def turn_s(self, group: Sequence[SimulatedEdit]) -> float:
        """Of one turn."""
        rows = sum(edit.row_count * self.turns.row_equivalents(edit.computed_share) for edit in group)
        loaded = sum(edit.row_count for edit in group if edit.loads)
        if not loaded:
            return self.turns.seconds(rows)
        return self.loading_s(round(4 * rows) / 4, sum(edit.row_count for edit in group), loaded)

    @functools.cache  # noqa: B019 - one for a run
    def loading_s(self, row_equivalents: float, rows: int, loaded: int) -> float:
        """Of one turn, some rows of which load what they do not compute: the exact plan's end."""
        full, masked = self.turns.seconds(rows) / _BLOCKS, self.turns.seconds(row_equivalents) / _BLOCKS
        load = self.load_share * self.turns.row_s * loaded / _BLOCKS
        return plan_step([BlockCost(name="", full_s=full, masked_s=masked, load_s=load)] * _BLOCKS).compute_s

    def times(self) -> StepTimes:
        """Of plain rows, as workers report them."""
        return StepTimes.from_entries((SHAPE, rows, self.turns.seconds(rows)) for rows in (1, 2, 4, 8, 16))

    def fractions(self) -> RowFractions:
        """The same of masked rows: as parts of a plain row's own cost, the turn's counted in."""
        return RowFractions.from_entries([(SHAPE, self.turns.fixed_share)])


class Balancer(Protocol):
    """Says where edits go."""

    def arrived(self, edit: SimulatedEdit, now_s: float) -> None:
        """It comes."""

    def changed(self, worker: SimulatedWorker, now_s: float) -> None:
        """A worker has made a turn."""


class SimulatedWorker:
    """One worker: the edits that it was given, those that it denoises, and the templates in its memory."""

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
        """It gets an edit."""
        edit.loads = edit.template not in self.templates
        self.here[edit.number] = edit
        self._batcher.add(edit)

    def turn(self) -> tuple[float, list[SimulatedEdit]]:
        """Makes the next turn: its seconds, and those whose last step it was."""
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
        """An edit has ended; what it has loaded stays for others."""
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
    """Runs edits to their ends. A balancer gives workers what it likes with `give`."""

    def __init__(self, workers: int, costs: FleetCosts) -> None:
        self.costs = costs
        self.workers = [SimulatedWorker(f"w{number}", costs) for number in range(workers)]
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._balancer: Balancer | None = None

    def run(self, edits: Sequence[SimulatedEdit], balancer: Balancer) -> list[float]:
        """Seconds that each took from its arrival."""
        self._balancer = balancer
        for edit in edits:
            self.at(edit.at_s, functools.partial(balancer.arrived, edit))
        while self._events:
            event = heapq.heappop(self._events)
            event.act(event.at_s)
        return [edit.ended_s - edit.at_s for edit in edits]

    def at(self, at_s: float, act: Callable[[float], None]) -> None:
        """Has something done then."""
        heapq.heappush(self._events, _Event(at_s, next(self._numbers), act))

    def give(self, worker: SimulatedWorker, edit: SimulatedEdit, now_s: float) -> None:
        """A worker gets an edit."""
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
