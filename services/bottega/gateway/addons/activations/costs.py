"""What an edit costs at workers that have to load its template, in seconds beside its turns: plain numbers.

A worker loads while it computes, and computes what would come too late; so what it loads costs at most what it saves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bottega.gateway.fleet.members import Member
from bottega.gateway.jobs.job import Job
from bottega.planning import Shape
from bottega.v1 import fleet_pb2

# Kinds of edits of a worker that are remembered until its next report.
_MOST_KINDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingCost:
    """Of all turns of an edit. longer_s: that they take with loads beside them. saved_s: what they take less than in
    full.
    """

    longer_s: float = 0.0
    saved_s: float = 0.0

    def with_disk(self, disk_s: float) -> float:
        """Seconds that the edit costs more than where nothing is loaded, if the disk has to be read for so long."""
        return min(self.longer_s + disk_s, self.saved_s)


_Kind = tuple[int, int, Shape, float]


@dataclass(slots=True, kw_only=True)
class _KnownCosts:
    """Of one worker, by the report that they follow from."""

    load: fleet_pb2.Load
    costs: dict[_Kind, LoadingCost] = field(default_factory=dict)


class LoadingCosts:
    """Found out once for each kind of edit and report of a worker: the scheduler asks for many jobs at every look."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownCosts] = {}

    def of(self, job: Job, member: Member) -> LoadingCost:
        """Of a job at a worker."""
        known = self._known.get(member.name)
        if known is None or known.load is not member.load:
            known = self._known[member.name] = _KnownCosts(load=member.load)
        steps = job.steps.total // job.num_images
        kind = (job.rows, steps, job.request.shape, job.request.computed_share)
        if kind not in known.costs:
            if len(known.costs) >= _MOST_KINDS:
                known.costs.clear()
            known.costs[kind] = _cost(member, *kind)
        return known.costs[kind]

    def forget(self, name: str) -> None:
        """A worker is lost."""
        self._known.pop(name, None)


def _cost(member: Member, rows: int, steps: int, shape: Shape, share: float) -> LoadingCost:
    masked_rows = rows * member.fractions.fraction(shape, share)
    full_s, masked_s = member.times.seconds(shape, rows), member.times.seconds(shape, masked_rows)
    if full_s is None or masked_s is None:
        return LoadingCost()
    loading_s = member.planned.seconds(shape, masked_rows) or 0.0
    return LoadingCost(longer_s=steps * max(0.0, loading_s - masked_s), saved_s=steps * max(0.0, full_s - masked_s))
