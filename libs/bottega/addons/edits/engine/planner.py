"""Plans the loads of all running edits: which blocks of the next steps load activations, and which compute all tokens.

The engine calls `plan` before each turn, that is, each forward pass of a batch. A plan covers a few turns, so that
loading never waits for a turn to begin. A decision for a step is final, because its loads are already requested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from torch import Tensor

from bottega.addons.edits.engine.masked.work import BlockWork
from bottega.addons.edits.engine.recordings.recording import StepKey
from bottega.addons.edits.engine.recordings.source import ActivationSource
from bottega.addons.edits.engine.recordings.step import RecordedStep
from bottega.addons.edits.engine.recordings.step_access import StepLoads
from bottega.addons.edits.engine.times import BlockTimes, Size
from bottega.addons.edits.planning import BlockCost, StepPlan, plan_steps

# Bytes per request, in the order of use over all rows: the tensors of one SDXL block are some MiB.
_REQUEST_BYTES = 2 << 20
# Upper bound on the wait for a block, even if its measured time is longer: the engine sends no heartbeat while it
# waits.
_MOST_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComingRow:
    """A row of a future step that reuses activations from a recording."""

    key: StepKey
    step: RecordedStep
    computed: Tensor
    """Latent elements that the edit computes, bool [latent height, latent width]."""
    share: float
    loads: dict[StepKey, StepLoads]
    """The decisions for the row's image, by the key of the step; `decide` adds one."""

    @property
    def decided(self) -> StepLoads | None:
        """The decision for the row's step; None if there is none, or if the recorded step was replaced since then."""
        known = self.loads.get(self.key)
        return known if known is not None and known.step is self.step else None

    def decide(self, seconds: Sequence[float]) -> StepLoads:
        """Add an empty decision for the step, with the row's planned seconds for each block."""
        loads = self.loads[self.key] = StepLoads(self.step, seconds)
        return loads


Coming = tuple[Sequence[ComingRow], int]
"""Rows of a step that reuse activations, and the number of the image's other rows, which compute all tokens."""


class EditReader(Protocol):
    """An image of an edit that reads from a recording."""

    @property
    def size(self) -> Size:
        """Height and width of the latent."""
        ...

    def coming(self, turn: int) -> Coming:
        """Return the rows of the image's step that is `turn` forward passes ahead; 0 is the next one."""
        ...

    @property
    def outstanding(self) -> Iterable[StepLoads]:
        """Decisions whose loads may not have finished."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _New:
    """A row whose loads are not decided yet. Its lists have one item for each block."""

    row: ComingRow
    away: Sequence[Sequence[str]]
    """Outputs that must be loaded to reuse the block; empty if nothing is missing, or the block cannot be reused."""
    full_s: Sequence[float]
    masked_s: Sequence[float]
    """Seconds of the block if it is reused; equal to `full_s` if it cannot be."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """The work of one future forward pass."""

    seconds: list[float]
    """Seconds of each block for the rows whose loads are decided."""
    new: list[_New] = field(default_factory=list)
    """Rows that need loads, which are not decided."""

    def add(self, seconds: Sequence[float]) -> None:
        self.seconds = [total + own for total, own in zip(self.seconds, seconds, strict=True)]


def choose_plans(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> list[StepPlan]:
    """Return the plans that finish earliest; see `bottega.planning.plan_steps`."""
    return plan_steps(steps, load_busy_s=load_busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """How plans are made and followed."""

    choose: Callable[[Sequence[Sequence[BlockCost]], float], list[StepPlan]] = choose_plans
    """Plans the steps. The second argument is the seconds until earlier loads finish; see
    `bottega.planning.plan_steps`."""
    turns: int = 3
    """Forward passes for which a plan decides: the next one and two more. Then there is always something to load while
    the next plan is made, and little is loaded in vain if an edit ends or is cancelled."""
    outlook: int = 2
    """Further forward passes, which a plan assumes to be like the last one. Without them it would not load ahead for
    them, and edits would take 2 to 5 % longer if loading takes two to six times as long as the masked computation
    (simulated with the costs of the model of the benches; two are enough)."""
    patience: float = 1.0
    """How long to wait for a block's activations, as a multiple of the time to compute the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A planned step that loads activations."""

    size: Size
    row_equivalents: float
    """Compute time of the step's rows without loads, in multiples of the time of a row that computes all tokens."""
    seconds: float
    """Planned seconds of computation in the step."""


# A recorded tensor: the id() of its step, as steps have no names, and its name.
_Name = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutlook:
    """The state of loading when a plan is made."""

    ends_s: Mapping[_Name, float]
    """Seconds from now until each pending tensor will have arrived."""
    behind: int
    """Number of forward passes, after those for which the plan decides, in which images still read recordings."""

    @property
    def busy_s(self) -> float:
        """Seconds until all pending tensors will have arrived."""
        return max(self.ends_s.values(), default=0.0)


class LoadPlanner:
    """Plans the loads of all images that read from one source."""

    def __init__(self, source: ActivationSource, times: BlockTimes, policy: LoadPolicy | None = None) -> None:
        self._source = source
        self._times = times
        self._policy = policy or LoadPolicy()
        self._numbers = itertools.count()

    def plan(self, readers: Sequence[EditReader], others: int) -> list[PlannedStep]:
        """Decide what these images load for their next steps, and request it. `others`: batch rows of other requests.

        Return for each latent size the last step for which a new load was planned.
        """
        rate, planned = self._source.load_bytes_per_s, list[PlannedStep]()
        if rate is None:
            return planned
        for size in dict.fromkeys(reader.size for reader in readers):
            same = [reader for reader in readers if reader.size == size]
            coming = [[reader.coming(turn) for reader in same] for turn in range(self._policy.turns)]
            if any(not row.step.writable for turn in coming for rows, _ in turn for row in rows):
                # Computed before deciding: the loads that are decided below are not pending yet.
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
        """Plan the forward passes of all images of one latent size, and return the last step that was planned now."""
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
    """Return the seconds until each pending tensor arrives, in the order of the requests."""
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
    """Return the cost of each block in one forward pass, in which all rows either load a block or compute it."""
    costs = []
    for place, block in enumerate(blocks):
        least_s = turn.seconds[place] + sum(new.masked_s[place] for new in turn.new)
        away = [new for new in turn.new if new.away[place]]
        saved_s = sum(new.full_s[place] - new.masked_s[place] for new in away)
        # Edits of one template at the same step need the same tensors, which are loaded once.
        loaded = {id(new.row.step): new for new in away if not new.row.step.mapped}.values()
        names = [(new.row.step, name) for new in loaded for name in new.away[place]]
        load_bytes = sum(step.bytes_of(name) for step, name in names if (id(step), name) not in ends_s)
        # Does not matter if the block also has new loads: those come after all pending ones.
        ready_s = max((ends_s.get((id(step), name), 0.0) for step, name in names), default=0.0)
        full_s, load_s = least_s + max(0.0, saved_s), load_bytes / rate
        costs.append(BlockCost(name=block.name, full_s=full_s, masked_s=least_s, load_s=load_s, ready_s=ready_s))
    return costs


def _decide(
    blocks: Sequence[BlockWork], turn: _Turn, plan: StepPlan, patience_s: Sequence[float], numbers: Iterator[int]
) -> None:
    """Store which outputs the rows of a forward pass load, and request them in the order of use.

    `patience_s` has a value for each block.
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
    return [
        full_s if away and not takes else masked_s
        for away, takes, full_s, masked_s in zip(new.away, plan.takes, new.full_s, new.masked_s, strict=True)
    ]


def _batches(wanted: Sequence[tuple[RecordedStep, Sequence[str]]]) -> Iterator[tuple[RecordedStep, Sequence[str]]]:
    """Group names by step, so that outputs used within about `_REQUEST_BYTES` of each other are requested together."""
    pieces: dict[int, tuple[RecordedStep, list[str]]] = {}
    size_bytes = 0
    for step, names in wanted:
        pieces.setdefault(id(step), (step, []))[1].extend(names)
        size_bytes += sum(step.bytes_of(name) for name in names)
        if size_bytes >= _REQUEST_BYTES:
            yield from pieces.values()
            pieces, size_bytes = {}, 0
    yield from pieces.values()
