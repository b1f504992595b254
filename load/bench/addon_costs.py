"""Do jobs end when they are expected to, and sooner, if the scheduler learns what ControlNets and LoRAs cost?

A simulated fleet draws a mixed stream of plain pictures and pictures with ControlNets and LoRAs. Turns wait for
ControlNets on servers, and take longer with LoRAs. The gateway's policy gives out the jobs: once with estimates that
leave add-ons out, and once with the gateway's own estimates (`AddOnCosts`), which learn from each finished job. The
stream is the same for both, and one measurement in fifty is an outlier. Nothing real is computed, so every run gives
the same figures.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.addon_costs import AddOnCosts
from bottega.gateway.scheduling.policy import PendingJob
from bottega.gateway.scheduling.worker_plan import Findings, ResourceRequest, WorkerState
from bottega.v1.generation_pb2 import Provenance
from load.bench.framework import Bench, Option, Sheet, percentile
from load.bench.scheduling_fleet import (
    MAX_ROWS,
    ROWS,
    SHAPE,
    FleetCosts,
    Policy,
    SimulatedEdit,
    SimulatedFleet,
    SimulatedWorker,
    TurnCosts,
)
from tests.fakes.fake_time import FakeTime
from tests.samples.jobs import sample_job

# A guided step of SDXL on a current GPU takes 60 ms.
TURNS = TurnCosts(turn_s=0.012, row_s=0.024, fixed_share=0.3, encode_s=0.05, decode_s=0.15, r2=1.0)
# Seconds that a turn waits for the ControlNets of a picture, by their number.
_WAITS_S = (0.0, 0.03, 0.05, 0.09)
# Seconds that each LoRA adds to a row.
_LORA_S = 0.006
_STEPS = (8, 20, 30, 50)
# The gateway's slo_scale.
_DUE_SCALE = 2.0
# A picture is in time within this many times its seconds alone.
_SLO = 2.5
# Arrivals, as a share of what the fleet can draw one by one.
_LOAD = 0.75
# Share of the first pictures, from which the estimates learn.
_WARM_UP = 0.2
_OUTLIER_EVERY, _OUTLIER = 50, 20.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--pictures", 4000, "of the stream", smallest=400),
    Option("--workers", 8, "of the fleet", smallest=4),
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Picture(SimulatedEdit):
    """A picture with ControlNets and LoRAs, and the measured seconds of its turns."""

    job: Job
    plain_s: float = 0.0
    waited_s: float = 0.0
    loras_s: float = 0.0
    expected_s: float = 0.0
    """Estimated seconds that it takes alone, when it arrives."""
    due_at_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds that a turn waits for its ControlNets."""
        return _WAITS_S[len(self.job.controlnets)]

    @property
    def lora_s(self) -> float:
        """Seconds that its LoRAs add to a turn."""
        return ROWS * len(self.job.lora_set) * _LORA_S

    @property
    def alone_s(self) -> float:
        """Seconds that it takes alone."""
        turn_s = TURNS.seconds(ROWS) + self.wait_s + self.lora_s
        return TURNS.encode_s + TURNS.decode_s + self.steps * turn_s


class _TurnsWithAddOns(FleetCosts):
    """The seconds of turns that wait for ControlNets, and compute LoRAs beside the weights."""

    def turn_s(self, group: Sequence[SimulatedEdit]) -> float:
        pictures = [picture for picture in group if isinstance(picture, _Picture)]
        for picture in pictures:
            picture.plain_s += self.turns.seconds(ROWS)
            picture.waited_s += picture.wait_s
            picture.loras_s += picture.lora_s
        return self.turns.seconds(ROWS * len(pictures)) + sum(picture.wait_s + picture.lora_s for picture in pictures)


class _Fleet(SimulatedFleet):
    """A fleet whose finished pictures teach the estimates.

    Args:
        estimates: Costs of add-ons; they learn nothing where they are left out.
        learns: Whether they are not left out.
    """

    def __init__(self, workers: int, *, learns: bool) -> None:
        super().__init__(workers, _TurnsWithAddOns(turns=TURNS))
        self.time, self._learns = FakeTime(), learns
        self.estimates = AddOnCosts(self.time.clock())

    def _turned(self, worker: SimulatedWorker, ended: list[SimulatedEdit], now_s: float) -> None:
        self.time.now = now_s
        for picture in ended if self._learns else ():
            assert isinstance(picture, _Picture)
            waited_s = picture.waited_s * (1.0 if picture.number % _OUTLIER_EVERY else _OUTLIER)
            measured = Provenance(plain_s=picture.plain_s, controlnets_s=waited_s, loras_s=picture.loras_s)
            self.estimates.note(picture.job, measured)
        super()._turned(worker, ended, now_s)


class _Estimating(Policy):
    """The gateway's policy with the fleet's estimates."""

    def __init__(self, fleet: _Fleet) -> None:
        super().__init__(fleet)
        self._estimates = fleet.estimates
        self._now_s = 0.0

    def arrived(self, edit: SimulatedEdit, now_s: float) -> None:
        """Estimate the picture's seconds alone, from which it is due, and put it into the order of the queue."""
        assert isinstance(edit, _Picture)
        state = self._new_state(self._fleet.workers[0], Findings(alone=self._alone, turns=self._turns))
        edit.expected_s = state.alone_s(self._request(edit, edit.steps)) + state.fixed_s
        edit.due_at_s = now_s + _DUE_SCALE * edit.expected_s
        super().arrived(edit, now_s)
        self._waiting = deque(sorted(self._waiting, key=_due_at_s))

    def _look(self, now_s: float) -> None:
        self._now_s = now_s
        super()._look(now_s)

    def _pending(self) -> Iterator[PendingJob]:
        for edit in self._waiting:
            assert isinstance(edit, _Picture)
            due_s = edit.due_at_s - self._now_s
            yield PendingJob(job_id=str(edit.number), request=self._request(edit, edit.steps), due_s=due_s)

    def _new_state(self, worker: SimulatedWorker, findings: Findings) -> WorkerState:
        return WorkerState(
            worker=worker.name,
            running=tuple(self._request(edit, edit.steps_left) for edit in worker.here.values() if edit.steps_left),
            times=self._times,
            fixed_s=TURNS.encode_s + TURNS.decode_s,
            max_rows=MAX_ROWS,
            fractions=self._fractions,
            findings=findings,
            due_s=tuple(
                edit.due_at_s - self._now_s
                for edit in worker.here.values()
                if isinstance(edit, _Picture) and edit.steps_left
            ),
        )

    def _request(self, edit: SimulatedEdit, steps: int) -> ResourceRequest:
        assert isinstance(edit, _Picture)
        return ResourceRequest(rows=ROWS, steps=steps, shape=SHAPE, slowdown=self._estimates.slowdown(edit.job))


def _due_at_s(edit: SimulatedEdit) -> float:
    assert isinstance(edit, _Picture)
    return edit.due_at_s


def _pictures(count: int, workers: int) -> list[_Picture]:
    """Return the stream: a third of its pictures are plain, and most others have a ControlNet or two, and LoRAs."""
    chance = random.Random("add-ons")
    pictures = []
    for number in range(count):
        nets = chance.choices(range(4), weights=(5, 3, 2, 1))[0]
        job = sample_job(controlnets=[f"net-{chance.randrange(6)}-{place}" for place in range(nets)])
        loras = chance.choices(range(3), weights=(6, 2, 2))[0]
        job.lora_set = tuple((f"{place:064x}", 1.0) for place in range(loras))
        steps = job.steps.total = chance.choice(_STEPS)
        pictures.append(_Picture(number=number, at_s=0.0, computed_share=1.0, template=0, steps=steps, job=job))
    per_s = _LOAD * workers / fmean(picture.alone_s for picture in pictures)
    for picture, at_s in zip(pictures, itertools.accumulate(chance.expovariate(per_s) for _ in pictures), strict=False):
        picture.at_s = at_s
    return pictures


def simulate(count: int, workers: int, *, learns: bool) -> Mapping[str, float]:
    """Return the figures of one side, over the stream without its first part."""
    pictures = _pictures(count, workers)
    fleet = _Fleet(workers, learns=learns)
    took_s = fleet.run(pictures, _Estimating(fleet))
    judged = list(zip(pictures, took_s, strict=True))[int(_WARM_UP * count) :]
    errors = [abs(picture.expected_s / picture.alone_s - 1.0) for picture, _ in judged if picture.job.controlnets]
    return {
        "error": fmean(errors),
        "error_p50": percentile(errors, 0.5),
        "error_p95": percentile(errors, 0.95),
        "p95_s": percentile([seconds for _, seconds in judged], 0.95),
        "p95_over_alone": percentile([seconds / picture.alone_s for picture, seconds in judged], 0.95),
        "in_time": fmean(seconds <= _SLO * picture.alone_s for picture, seconds in judged),
    }


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Simulate both sides."""
    sides = {learns: simulate(options.pictures, options.workers, learns=learns) for learns in (False, True)}
    for learns, name in ((False, "without what add-ons cost"), (True, "with what was learned")):
        key, side = "learned" if learns else "left_out", sides[learns]
        bar = "at most 0.05" if learns else ""
        sheet.figure(f"error of estimates with ControlNets, {name}", side["error"], key=f"{key}_error", bar=bar)
        sheet.figure("    p95 of all pictures", side["p95_s"], "{:.1f} s", key=f"{key}_p95_s")
        over, bar = side["p95_over_alone"], f"at most {sides[False]['p95_over_alone']:.2f}" if learns else ""
        sheet.figure("    p95 of seconds over seconds alone", over, key=f"{key}_p95_over_alone", bar=bar)
        in_time, bar = side["in_time"], f"at least {sides[False]['in_time']:.2f}" if learns else ""
        sheet.figure(f"    in time ({_SLO:g} times their seconds alone)", in_time, key=f"{key}_in_time", bar=bar)


if __name__ == "__main__":
    sys.exit(BENCH.command())
