"""What an edit costs at workers that have to load its template, in seconds beside its turns: plain numbers.

A worker loads while it computes, and computes what would come too late; so what it loads costs at most what it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from bottega.gateway.fleet.members import Member
from bottega.gateway.jobs.job import Job
from bottega.planning import Shape, rounded_share

# Kinds of edits that are remembered: there are 32 for each number of rows and size of pictures.
_MOST_KINDS = 256

# Rows in each turn, the shape of its latent, and the share of tokens that is computed.
_Kind = tuple[int, Shape, float]
# Of one turn: seconds that it takes longer with loads beside it, and seconds that it takes less than in full.
_TurnCost = tuple[float, float]


class LoadingCosts:
    """Found out once for each kind of edit and report of a worker: the scheduler asks for many jobs at every look."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, dict[str, _TurnCost]] = {}

    def of(
        self, job: Job, workers: Mapping[str, Member], *, disk_s: float, having: Set[str] = frozenset()
    ) -> Callable[[str], float]:
        """Seconds that an edit costs more at a worker, by its name, than where nothing is loaded.

        disk_s: that the disk has to be read for. having: names of workers that have nothing to load.
        """
        kind = (job.rows, job.request.shape, rounded_share(job.request.computed_share))
        costs, turns = self._of_kind(kind), job.steps.total // job.num_images

        def seconds(name: str) -> float:
            if name in having:
                return 0.0
            known = costs.get(name)
            if known is None:
                known = costs[name] = _cost(workers[name], *kind)
            longer_s, saved_s = known
            return min(turns * longer_s + disk_s, turns * saved_s)

        return seconds

    def forget(self, name: str) -> None:
        """A worker has reported, or is lost."""
        for costs in self._kinds.values():
            costs.pop(name, None)

    def _of_kind(self, kind: _Kind) -> dict[str, _TurnCost]:
        """By worker, as far as they were asked for."""
        costs = self._kinds.get(kind)
        if costs is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            costs = self._kinds[kind] = {}
        return costs


def _cost(member: Member, rows: int, shape: Shape, share: float) -> _TurnCost:
    masked_rows = rows * member.fractions.fraction(shape, share)
    full_s, masked_s = member.times.seconds(shape, rows), member.times.seconds(shape, masked_rows)
    if full_s is None or masked_s is None:
        return 0.0, 0.0
    loading_s = member.planned.seconds(shape, masked_rows) or 0.0
    return max(0.0, loading_s - masked_s), max(0.0, full_s - masked_s)
