"""Learns from finished jobs how much ControlNets and LoRAs add to denoising steps."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from bottega import kinds
from bottega.clocks import Clock
from bottega.gateway.jobs.job import Job
from bottega.v1.generation_pb2 import Provenance

# Number of kinds of jobs that are kept. Beyond it, the one that was measured longest ago is dropped.
_MAX_KINDS = 4096
# Measurements of a kind that are kept. Their median follows a lasting change after half of them.
_MEASUREMENTS = 16
# A measurement counts half after so many seconds: a server that was busy then may be idle now.
_HALF_LIFE_S = 600.0
# A ratio beyond this bound is a measurement error, for example because the machine was stopped meanwhile.
_MAX_SLOWDOWN = 32.0
# Slowdowns are rounded to 2 %, so that jobs of a kind have equal resource requests.
_STEPS_A_DOUBLING = 32
# Least measurements of the same names that count, because one alone may be an outlier. Before, their number counts.
_LEAST_BY_NAMES = 3
# Upper bound on the add-ons of one sort in a job, from which the cost of another number is estimated.
_MAX_NUMBER = 16


@dataclass(slots=True, kw_only=True)
class _Kind:
    """The measured costs of similar jobs."""

    added: float = 0.0
    """What add-ons add to a plain step, as a share of it: the weighted median of the measurements."""
    measured: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS))
    """Time, weight and added share of each measurement."""

    def note(self, now: float, turns: float, added: float) -> None:
        """Add a measurement over so many turns."""
        self.measured.append((now, turns, added))
        weighted = sorted((share, weight * 0.5 ** ((now - at) / _HALF_LIFE_S)) for at, weight, share in self.measured)
        half, passed = sum(weight for _, weight in weighted) / 2, 0.0
        for place, (share, weight) in enumerate(weighted):
            passed += weight
            if passed > half:
                self.added = share
                return
            if passed == half:  # as in a median of an even number
                self.added = (share + weighted[place + 1][0]) / 2
                return


class AddOnCosts:
    """Measured slowdowns of jobs by their ControlNets and LoRAs, relative to the same steps without them.

    The workers' step times are measured without add-ons. What add-ons add depends on the add-ons, on the server that
    runs them and on the connection to it, so it is learned from the turns of finished jobs: their waits for ControlNets
    and their LoRAs' seconds over their plain seconds. Both parts are from the same turns, so other jobs in these turns
    and the speed of the worker do not matter.

    ControlNets are told apart by their names, and else by their number, LoRAs by their number. Each tenant has its own
    estimates, so that no tenant's jobs change those of another. Jobs are weighted by their turns.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._slowdowns: dict[Hashable, float] = {}  # by owner and add-ons, cleared by each measurement

    def note(self, job: Job, provenance: Provenance) -> None:
        """Update the estimates with the measured turns of a finished job."""
        plain_s, turns = provenance.plain_s, job.steps.total / job.num_images
        if not (0.0 < plain_s < math.inf and turns > 0):
            return  # nothing was measured, for example because the worker is older
        added_s = {kinds.CONTROLNET: provenance.controlnets_s, kinds.LORAS: provenance.loras_s}
        for sort, names, number in _addons(job):
            added = added_s[sort] / plain_s
            if not 0.0 <= added < math.inf:
                continue
            owner = _owner(job)
            for which in (names, number) if names else (number,):
                self._note((*owner, sort, which), turns, min(added, _MAX_SLOWDOWN - 1.0))

    def slowdown(self, job: Job) -> float:
        """Return how many times as long a job's steps take as without add-ons; 1 if nothing is known of them."""
        if not (job.controlnets or job.lora_set):
            return 1.0
        key = *_owner(job), job.controlnets, len(job.lora_set)
        slowdown = self._slowdowns.get(key)
        if slowdown is None:
            if len(self._slowdowns) >= _MAX_KINDS:
                self._slowdowns.clear()
            slowdown = self._slowdowns[key] = self._estimate(job)
        return slowdown

    def _estimate(self, job: Job) -> float:
        slowdown = 1.0 + sum(self._added(_owner(job), *addons) for addons in _addons(job))
        doublings = round(math.log2(slowdown) * _STEPS_A_DOUBLING) / _STEPS_A_DOUBLING
        return float(min(2.0**doublings, _MAX_SLOWDOWN))

    def _note(self, key: Hashable, turns: float, added: float) -> None:
        self._slowdowns.clear()
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        kind.note(self._clock.monotonic(), turns, added)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)

    def _added(self, owner: tuple[Hashable, ...], sort: str, names: tuple[str, ...], number: int) -> float:
        """Return what the add-ons of one sort add to a step: as measured, else in proportion to another number."""
        known = self._kinds.get
        by_names = known((*owner, sort, names)) if names else None
        if by_names is not None and len(by_names.measured) >= _LEAST_BY_NAMES:
            return by_names.added
        by_number = known((*owner, sort, number))
        if by_number is not None:
            return by_number.added
        others = (other for off in range(1, _MAX_NUMBER) for other in (number - off, number + off) if other > 0)
        for other in others:
            if (kind := known((*owner, sort, other))) is not None:
                return kind.added * number / other
        return 0.0


def _owner(job: Job) -> tuple[Hashable, ...]:
    return job.request.tenant, job.bare.model


def _addons(job: Job) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield the sort, the names and the number of a job's add-ons of each sort. LoRAs have no names here."""
    if job.controlnets:
        yield kinds.CONTROLNET, tuple(sorted(job.controlnets)), len(job.controlnets)
    if job.lora_set:
        yield kinds.LORAS, (), len(job.lora_set)
