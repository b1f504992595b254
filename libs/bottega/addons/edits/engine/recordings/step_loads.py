"""The planned loads of one row in one step, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic

from bottega.addons.edits.engine.masked.work import BlockWork
from bottega.addons.edits.engine.recordings.step import LoadTime, RecordedStep

# Shorter waits are mere look-ups.
_LEAST_WAIT_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWait:
    """A period in which the engine waited for a block's activations."""

    block: str
    began_s: float
    """Start of the wait, on CLOCK_MONOTONIC."""
    seconds: float


@dataclass(slots=True, kw_only=True)
class StepLoadCounts:
    """Counts about the loads of finished steps."""

    loaded: int = 0
    """Blocks that used loaded activations."""
    recomputed: int = 0
    """Recorded blocks that were computed because their activations were not loaded."""
    waited_s: float = 0.0
    """Seconds that the engine waited for loads."""
    waits: list[LoadWait] = field(default_factory=list)
    """Waits of at least 0.1 ms; shorter ones are only lookups."""
    came: list[LoadTime] = field(default_factory=list)
    """Times of the loads that arrived."""

    def add(self, other: StepLoadCounts) -> None:
        self.loaded += other.loaded
        self.recomputed += other.recomputed
        self.waited_s += other.waited_s
        self.waits += other.waits
        self.came += other.came


class StepLoads:
    """The load decision for one row of one step, with the row's planned seconds for each block."""

    def __init__(self, step: RecordedStep, seconds: Sequence[float] = ()) -> None:
        self.step = step
        self.seconds = seconds
        self.waited_s = 0.0
        self._waits: list[LoadWait] = []
        self._away: list[BlockWork] = []
        self._blocks: dict[str, str] = {}
        self._patience_s: dict[str, float] = {}
        self._outstanding: deque[tuple[int, str]] = deque()

    def compute(self, block: BlockWork) -> None:
        """Plan to compute a block, although a store has its activations."""
        self._away.append(block)

    def take(self, block: BlockWork, names: Sequence[str], patience_s: float, number: int) -> None:
        """Plan to reuse a block whose missing outputs, `names`, were requested; wait `patience_s` for all of them.

        `number` is the position of the request among all requests of the planner.
        """
        self._away.append(block)
        self._blocks |= dict.fromkeys(names, block.name)
        self._patience_s[block.name] = patience_s
        self._outstanding.extend((number, name) for name in names)

    @property
    def outstanding(self) -> Collection[tuple[int, str]]:
        """Request number and name of each output that has not arrived, in the order in which they will arrive."""
        while self._outstanding and self.step.get(self._outstanding[0][1]) is not None:
            self._outstanding.popleft()
        return self._outstanding

    def wait_for(self, name: str) -> bool:
        """Wait for a planned output, within the time left for its block, and return whether it arrived."""
        block = self._blocks.get(name)
        if block is None or self._patience_s[block] <= 0.0:
            return False
        began_s = monotonic()
        here = self.step.wait(name, self._patience_s[block])
        waited_s = monotonic() - began_s
        self.waited_s += waited_s
        if waited_s >= _LEAST_WAIT_S:
            self._waits.append(LoadWait(block=block, began_s=began_s, seconds=waited_s))
        # If one output is late, the block is computed, and its others are not needed.
        self._patience_s[block] = self._patience_s[block] - waited_s if here else 0.0
        return here

    def counts(self, reused: Collection[str]) -> StepLoadCounts:
        """Return the counts of the finished step, in which the row reused the outputs `reused`."""
        loaded = sum(all(name in reused for name in block.names) for block in self._away)
        return StepLoadCounts(
            loaded=loaded,
            recomputed=len(self._away) - loaded,
            waited_s=self.waited_s,
            waits=self._waits,
            came=list(self.step.take_load_times()),
        )
