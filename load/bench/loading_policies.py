"""Ways to load what was recorded, as an engine's planner follows them: the suite's, InstGenIE's, and the plain ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bottega.addons.edits.engine.loading.planner import EditReader, LoadPlanner, LoadPolicy, PlannedStep
from bottega.addons.edits.engine.loading.times import BlockTimes
from bottega.addons.edits.engine.recordings.source import ActivationSource
from bottega.addons.edits.planning.block_loading import BlockCost, StepPlan, follow
from load.bench.greedy_loading import decide_one_by_one

# For a load that is to be waited for whatever happens.
_FOREVER = 1e4
_LONGEST_LOAD_S = 120.0


class SequencePlanner(LoadPlanner):
    """Loads all of a step before it is computed, and nothing meanwhile."""

    def plan(self, readers: Sequence[EditReader], others: int) -> list[PlannedStep]:
        """The same, when all of the next step is here."""
        planned = super().plan(readers, others)
        for row in (row for reader in readers for row in reader.coming(0)[0]):
            for name in row.step.names:
                row.step.wait(name, _LONGEST_LOAD_S)
        return planned


def planners(source: ActivationSource, times: BlockTimes) -> Mapping[str, LoadPlanner]:
    """By name.

    plan: the suite's. one_by_one: Algorithm 1. pipeline: loads everything, step after step, while it computes, and
    waits for each block. sequence: loads everything of a step, then computes it.
    """
    return {
        "plan": LoadPlanner(source, times),
        "one_by_one": LoadPlanner(source, times, LoadPolicy(choose=_one_by_one)),
        "pipeline": LoadPlanner(source, times, LoadPolicy(choose=_everything, patience=_FOREVER)),
        "sequence": SequencePlanner(source, times, LoadPolicy(choose=_everything, turns=1, patience=_FOREVER)),
    }


def _one_by_one(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> list[StepPlan]:
    return follow(steps, decide_one_by_one(steps, load_busy_s=load_busy_s), load_busy_s=load_busy_s)


def _everything(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> list[StepPlan]:
    return follow(steps, [True] * sum(map(len, steps)), load_busy_s=load_busy_s)
