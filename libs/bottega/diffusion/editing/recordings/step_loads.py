"""What one row takes at one step that was not in this process when that was planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic

from bottega.diffusion.editing.masked.work import BlockWork
from bottega.diffusion.editing.recordings.step import LoadTime, RecordedStep

# Shorter ones are looks at what is here.
_LEAST_WAIT_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWait:
    """That the engine waited for what a block takes. began_s: on CLOCK_MONOTONIC."""

    block: str
    began_s: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class StepLoadCounts:
    """loaded: blocks that took what had to be loaded. recomputed: that were computed, though they were recorded, for
    want of it. waited_s: for what was on its way. waits: of that, those that took a while. came: when it was.
    """

    loaded: int = 0
    recomputed: int = 0
    waited_s: float = 0.0
    waits: list[LoadWait] = field(default_factory=list)
    came: list[LoadTime] = field(default_factory=list)

    def add(self, other: StepLoadCounts) -> None:
        """Of another step."""
        self.loaded += other.loaded
        self.recomputed += other.recomputed
        self.waited_s += other.waited_s
        self.waits += other.waits
        self.came += other.came


class StepLoads:
    """step: whose. seconds: by block of the network, what the plan says that the row takes in it.

    Somebody who waits for a block's tensors does so for its patience at most, as computing it would take: see `take`.
    """

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
        """A block whose tensors are not here is computed."""
        self._away.append(block)

    def take(self, block: BlockWork, names: Sequence[str], patience_s: float, number: int) -> None:
        """A block takes what is requested now, or was before. names: of its tensors, those that are not here.

        number: of the request, in the order of all that whoever plans has made.
        """
        self._away.append(block)
        self._blocks |= dict.fromkeys(names, block.name)
        self._patience_s[block.name] = patience_s
        self._outstanding.extend((number, name) for name in names)

    @property
    def outstanding(self) -> Collection[tuple[int, str]]:
        """Number and name of what was requested, from the first one that is not here on: it comes in that order."""
        while self._outstanding and self.step.get(self._outstanding[0][1]) is not None:
            self._outstanding.popleft()
        return self._outstanding

    def wait_for(self, name: str) -> bool:
        """Waits for one that was planned, as long as its block's patience lasts. Whether it is here."""
        block = self._blocks.get(name)
        if block is None or self._patience_s[block] <= 0.0:
            return False
        began_s = monotonic()
        here = self.step.wait(name, self._patience_s[block])
        waited_s = monotonic() - began_s
        self.waited_s += waited_s
        if waited_s >= _LEAST_WAIT_S:
            self._waits.append(LoadWait(block=block, began_s=began_s, seconds=waited_s))
        # What has not come by now: the block's other tensors would be of no use.
        self._patience_s[block] = self._patience_s[block] - waited_s if here else 0.0
        return here

    def counts(self, reused: Collection[str]) -> StepLoadCounts:
        """When the step is made. reused: names that the row has taken."""
        loaded = sum(all(name in reused for name in block.names) for block in self._away)
        return StepLoadCounts(
            loaded=loaded,
            recomputed=len(self._away) - loaded,
            waited_s=self.waited_s,
            waits=self._waits,
            came=list(self.step.take_load_times()),
        )
