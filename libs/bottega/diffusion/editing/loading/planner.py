"""The plan for the edits in hand: which blocks of coming steps take what has to be loaded, and which are computed.

It is asked before each turn, and looks some turns ahead, so that the load stream never waits for a turn to begin. What
it has decided for a step stays: its loads are on their way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from torch import Tensor

from bottega.diffusion.editing.loading.times import BlockTimes, Size
from bottega.diffusion.editing.masked.work import BlockWork
from bottega.diffusion.editing.recordings.keys import StepKey
from bottega.diffusion.editing.recordings.source import ActivationSource
from bottega.diffusion.editing.recordings.step import RecordedStep
from bottega.diffusion.editing.recordings.step_loads import StepLoads
from bottega.planning import BlockCost, StepPlan, plan_steps

# Requests are made for so much at once, in the order of use of all rows: the tensors of one block of SDXL are some MiB.
_REQUEST_BYTES = 2 << 20
# However long a block takes by what was measured elsewhere: the engine says nothing while it waits.
_MOST_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComingRow:
    """A row of a step that comes, which takes from a recording what it does not compute.

    computed, share: see RowActivations. loads: its reader's decisions, by key of the row's step.
    """

    key: StepKey
    step: RecordedStep
    computed: Tensor
    share: float
    loads: dict[StepKey, StepLoads]

    @property
    def decided(self) -> StepLoads | None:
        """None where nothing was decided for the step as it is now."""
        known = self.loads.get(self.key)
        return known if known is not None and known.step is self.step else None

    def decide(self, seconds: Sequence[float]) -> StepLoads:
        """Keeps what follows. seconds: that the row takes, by block."""
        loads = self.loads[self.key] = StepLoads(self.step, seconds)
        return loads


Coming = tuple[Sequence[ComingRow], int]
"""Rows of a step that read, and how many more there are, which are computed whole."""


class EditReader(Protocol):
    """An image of an edit that reads from a recording."""

    @property
    def size(self) -> Size:
        """Of its latent."""
        ...

    def coming(self, turn: int) -> Coming:
        """Of the step that it makes in so many turns; 0 is the next one."""
        ...

    @property
    def outstanding(self) -> Iterable[StepLoads]:
        """What was decided for it that keeps the load stream busy, as far as it is not here."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _New:
    """A row that nothing was decided for. away: by block, names that were recorded and are not here.

    full_s, masked_s: by block; equal where it cannot take it.
    """

    row: ComingRow
    away: Sequence[Sequence[str]]
    full_s: Sequence[float]
    masked_s: Sequence[float]


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """seconds: by block, of all rows that are decided. new: those of which something has to be loaded."""

    seconds: list[float]
    new: list[_New] = field(default_factory=list)

    def add(self, seconds: Sequence[float]) -> None:
        """Of one more row that is decided."""
        self.seconds = [total + own for total, own in zip(self.seconds, seconds, strict=True)]


def choose_plans(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> list[StepPlan]:
    """Those that end first."""
    return plan_steps(steps, load_busy_s=load_busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """How plans are chosen and followed.

    choose: plans of steps whose load stream is busy for so many seconds, see `bottega.planning.plan_steps`.
    turns: that are decided at once. The one that comes next and two behind it: the load stream has work while a turn is
    chosen, and what it has loaded for an edit that ends or is cancelled is little.
    outlook: turns behind these that count, as if they were like the last of these: without them nothing would be left
    to be loaded ahead for the turns behind, which takes 2 to 5 % longer where loading takes two to six times as long as
    computing what masks leave (simulated with the costs of the bench model; two turns are enough).
    patience: how long a block is waited for, in times of what computing it takes.
    """

    choose: Callable[[Sequence[Sequence[BlockCost]], float], list[StepPlan]] = choose_plans
    turns: int = 3
    outlook: int = 2
    patience: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step that loads what it does not compute. size: of its latents. row_equivalents: its rows, each as what its
    blocks would take of a whole one's if all of it were here. seconds: that it takes by the plan.
    """

    size: Size
    row_equivalents: float
    seconds: float


# Of a tensor that a step has recorded: the step's id, as steps have no names, and its own.
_Name = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutlook:
    """ends_s: when what is on its way will be here, from now. behind: turns behind those that are decided now."""

    ends_s: Mapping[_Name, float]
    behind: int

    @property
    def busy_s(self) -> float:
        """Until the load stream is free."""
        return max(self.ends_s.values(), default=0.0)


class LoadPlanner:
    """Plans for readers of recordings of `source`. times: what blocks take."""

    def __init__(self, source: ActivationSource, times: BlockTimes, policy: LoadPolicy | None = None) -> None:
        self._source = source
        self._times = times
        self._policy = policy or LoadPolicy()
        self._numbers = itertools.count()

    def plan(self, readers: Sequence[EditReader], others: int) -> list[PlannedStep]:
        """Decides for the rows that come, and requests what they take. others: rows beside them, of whole pictures.

        Returns of each size the last step for which something new has to be loaded.
        """
        rate, planned = self._source.load_bytes_per_s, list[PlannedStep]()
        if rate is None:
            return planned
        for size in dict.fromkeys(reader.size for reader in readers):
            same = [reader for reader in readers if reader.size == size]
            coming = [[reader.coming(turn) for reader in same] for turn in range(self._policy.turns)]
            if any(not row.step.writable for turn in coming for rows, _ in turn for row in rows):
                # Before: what is decided here is not outstanding yet.
                ends_s = _on_their_way(readers, rate)
                further = range(self._policy.turns, self._policy.turns + self._policy.outlook)
                behind = sum(any(reader.coming(turn)[0] for reader in same) for turn in further)
                planned.extend(self._plan(size, coming, others, rate, LoadOutlook(ends_s=ends_s, behind=behind)))
        return planned

    def _row_equivalents(self, size: Size, coming: Sequence[Coming], others: int) -> float:
        works = [self._times.work(size, row.computed, row.share) for rows, _ in coming for row in rows]
        whole_s = sum(self._times.full_s(size))
        masked = sum(sum(self._times.masked_s(size, work)) / whole_s for work in works)
        return others + sum(computed for _, computed in coming) + masked

    def _plan(
        self, size: Size, coming: Sequence[Sequence[Coming]], others: int, rate: float, outlook: LoadOutlook
    ) -> list[PlannedStep]:
        """Of the readers of one size of pictures, by turn. Returns the last step that was planned now."""
        blocks = self._times.blocks(size)
        turns = [self._turn(size, of_turn, others) for of_turn in coming]
        last = max((place for place, turn in enumerate(turns) if turn.new), default=-1)
        if last < 0:
            return []
        steps = [_costs(blocks, turn, rate, outlook.ends_s) for turn in turns[: last + 1]]
        behind = outlook.behind if last == len(turns) - 1 else 0
        plans = self._policy.choose([*steps, *[steps[last]] * behind], outlook.busy_s)[: last + 1]
        for turn, plan, costs in zip(turns, plans, steps, strict=False):
            patience_s = [min(self._policy.patience * each.full_s, _MOST_PATIENCE_S) for each in costs]
            _decide(blocks, turn, plan, patience_s, self._numbers)
        seconds = plans[last].compute_s - (plans[last - 1].compute_s if last else 0.0)
        rows = self._row_equivalents(size, coming[last], others)
        return [PlannedStep(size=size, row_equivalents=rows, seconds=seconds)]

    def _turn(self, size: Size, coming: Sequence[Coming], others: int) -> _Turn:
        full_s = self._times.full_s(size)
        whole = others + sum(computed for _, computed in coming)
        turn = _Turn(seconds=[whole * each for each in full_s])
        for row in (row for rows, _ in coming for row in rows):
            decided = row.decided
            if decided is not None:
                turn.add(decided.seconds)
                continue
            new = self._new(size, row, full_s)
            if any(new.away):
                turn.new.append(new)
            else:
                turn.add(row.decide(new.masked_s).seconds)
        return turn

    def _new(self, size: Size, row: ComingRow, full_s: Sequence[float]) -> _New:
        work = self._times.work(size, row.computed, row.share)
        masked_s, away = self._times.masked_s(size, work), list[tuple[str, ...]]()
        recorded = frozenset(row.step.names)
        for place, block in enumerate(self._times.blocks(size)):
            if work.shares[place] < 1.0 and recorded.issuperset(block.names):
                away.append(tuple(name for name in block.names if row.step.get(name) is None))
            else:
                masked_s[place] = full_s[place]
                away.append(())
        return _New(row=row, away=away, full_s=full_s, masked_s=masked_s)


def _on_their_way(readers: Sequence[EditReader], rate: float) -> Mapping[_Name, float]:
    """What all readers wait for, once, in the order of the requests; and when each will be here, from now."""
    waited = [
        (number, each.step, name)
        for reader in readers
        for each in reader.outstanding
        for number, name in each.outstanding
    ]
    ends_s, ahead_bytes = dict[_Name, float](), 0
    for _, step, name in sorted(waited, key=itemgetter(0)):
        key = (id(step), name)
        if key not in ends_s and step.get(name) is None:
            ahead_bytes += step.bytes_of(name)
            ends_s[key] = ahead_bytes / rate
    return ends_s


def _costs(blocks: Sequence[BlockWork], turn: _Turn, rate: float, ends_s: Mapping[_Name, float]) -> list[BlockCost]:
    """Of one turn: what is not here is taken, or not, by all rows alike."""
    costs = []
    for place, block in enumerate(blocks):
        least_s = turn.seconds[place] + sum(new.masked_s[place] for new in turn.new)
        away = [new for new in turn.new if new.away[place]]
        saved_s = sum(new.full_s[place] - new.masked_s[place] for new in away)
        # Edits of one template at the same step take the same tensors, which are loaded once.
        loaded = {id(new.row.step): new for new in away if not new.row.step.mapped}.values()
        names = [(new.row.step, name) for new in loaded for name in new.away[place]]
        load_bytes = sum(step.bytes_of(name) for step, name in names if (id(step), name) not in ends_s)
        # Of no account beside a load: what is requested now comes behind all that is on its way.
        ready_s = max((ends_s.get((id(step), name), 0.0) for step, name in names), default=0.0)
        full_s, load_s = least_s + max(0.0, saved_s), load_bytes / rate
        costs.append(BlockCost(name=block.name, full_s=full_s, masked_s=least_s, load_s=load_s, ready_s=ready_s))
    return costs


def _decide(
    blocks: Sequence[BlockWork], turn: _Turn, plan: StepPlan, patience_s: Sequence[float], numbers: Iterator[int]
) -> None:
    """Keeps what the rows of a turn take, and requests it in the order of use. patience_s: by block. numbers: of
    requests.
    """
    wanted: list[tuple[RecordedStep, Sequence[str]]] = []
    loads = [new.row.decide(_seconds(new, plan)) for new in turn.new]
    for place, block in enumerate(blocks):
        for new, load in zip(turn.new, loads, strict=True):
            if new.away[place] and plan.takes[place]:
                load.take(block, new.away[place], patience_s[place], next(numbers))
                wanted.append((new.row.step, new.away[place]))
            elif new.away[place]:
                load.compute(block)
    for step, names in _batches(wanted):
        step.request(names)


def _seconds(new: _New, plan: StepPlan) -> list[float]:
    """What a row takes by the plan, by block."""
    return [
        full_s if away and not takes else masked_s
        for away, takes, full_s, masked_s in zip(new.away, plan.takes, new.full_s, new.masked_s, strict=True)
    ]


def _batches(wanted: Sequence[tuple[RecordedStep, Sequence[str]]]) -> Iterator[tuple[RecordedStep, Sequence[str]]]:
    """The same, in pieces: those of one step that are used within so many bytes of all are requested together."""
    pieces: dict[int, tuple[RecordedStep, list[str]]] = {}
    size_bytes = 0
    for step, names in wanted:
        pieces.setdefault(id(step), (step, []))[1].extend(names)
        size_bytes += sum(step.bytes_of(name) for name in names)
        if size_bytes >= _REQUEST_BYTES:
            yield from pieces.values()
            pieces, size_bytes = {}, 0
    yield from pieces.values()
