"""What ControlNets and LoRAs add to what jobs take, learnt from the seconds of devices that finished jobs have used.

Step times are of plain rows. A row that waits for ControlNets, or has LoRAs beside the weights, takes longer: by how
much depends on the add-ons, on where they run and on the link to there, so it is measured and not computed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

from bottega.gateway.jobs.job import Job

# Kinds of jobs that are remembered; of more, the one that was used longest ago is forgotten.
_MOST_KINDS = 1024
# Weight of a new measurement.
_WEIGHT = 0.2
# Bounds: a measurement beyond them is of something else, such as a machine that was held up.
_MOST = 32.0
# Slowdowns are told apart in steps of a quarter of a doubling, so that jobs of a kind stay alike to who plans for them.
_STEPS_A_DOUBLING = 4


class AddOnCosts:
    """How many times as long jobs take as plain ones of their rows, shape and steps, by model and add-ons."""

    def __init__(self) -> None:
        # Logarithms of what jobs took over what was expected of plain ones.
        self._ratios: OrderedDict[Hashable, float] = OrderedDict()

    def note(self, job: Job, *, plain_s: float, device_s: float) -> None:
        """Take in a finished job.

        Args:
            job: A job that was drawn from its beginning by one attempt.
            plain_s: Seconds that it was expected to take without its add-ons.
            device_s: Seconds of the device that it used. Measurements that say nothing are left out.
        """
        if not (0.0 < plain_s < math.inf and 0.0 < device_s < math.inf):
            return
        ratio = max(-math.log(_MOST), min(math.log(device_s / plain_s), math.log(_MOST)))
        kind = _kind(job)
        before = self._ratios.pop(kind, None)
        self._ratios[kind] = ratio if before is None else before + _WEIGHT * (ratio - before)
        if len(self._ratios) > _MOST_KINDS:
            self._ratios.popitem(last=False)

    def slowdown(self, job: Job) -> float:
        """Return how many times as long as a plain job a job takes, at least 1; 1 where nothing was measured."""
        own = self._ratios.get(_kind(job)) if job.controlnets or job.loras else None
        if own is None:
            return 1.0
        plain = self._ratios.get((job.bare.model, (), 0), 0.0)
        doublings = round((own - plain) / math.log(2.0) * _STEPS_A_DOUBLING) / _STEPS_A_DOUBLING
        return float(max(1.0, min(2.0**doublings, _MOST)))


def _kind(job: Job) -> Hashable:
    return job.bare.model, tuple(sorted(job.controlnets)), len(job.loras)
