"""What do bursts cost a fleet that `bottega scale` keeps, against fixed ones, and what do decisions take there?

Fleets of 64 to 1,000 workers at the most are simulated second by second: requests as service B of Katz' trace sends
them (ControlNets and LoRAs, 20 to 50 steps), with a burst of ten times as many for a minute in every ten. The
scaler decides with the gateway's own forecast. It is compared with a fixed fleet for the bursts, and with one that
takes as many seconds of devices as the scaler's, in which the seconds of starts count. Each worker draws one job at a
time; a job is in time if it takes at most five times what it takes alone.

Decisions are the real scheduler's, with ControlNets and LoRAs of the same trace, and with edits of templates.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from bottega.planning.scaling import ArrivalRate, Supply, TargetCount, Work, services_needed
from load.bench.framework import Bench, Option, Sheet, percentile
from load.bench.scheduling_decisions import decision_times_s
from load.replay.arrivals import ArrivalShape, BurstShape, arrival_times
from load.replay.trace_shape import CONTROLNETS_B, LORAS_B

WORKERS = (64, 256, 1000)
WANTED_DECISION_MS = 5.0
# A device draws a step of a guided SDXL picture in about .1 s, and a picture takes a second beside its steps.
_STEPS, _STEP_S, _FIXED_S = (20, 30, 50), 0.1, 1.0
# What a ControlNet beside the encoder and a LoRA add to a step.
_CONTROLNET_SHARE, _LORA_SHARE = 0.1, 0.05
_BURST = BurstShape(times=10.0, length_s=60.0, every_s=600.0)
# Load of the fixed fleet for bursts while they last.
_BURST_LOAD = 0.9
# A job is in time within so many times the seconds that it takes alone.
_IN_TIME = 5.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--minutes", 60, "of each simulated run", smallest=10),
    Option("--seeds", 3, "of each simulated run; figures are means, with the least and the largest", smallest=1),
    Option("--workers", list(WORKERS), "that there may be", smallest=[16]),
    Option("--start-s", 30.0, "seconds until a started worker is ready"),
    Option("--looks", 400, "of the scheduler that are measured, for each fleet", smallest=5),
    Option("--queued", 1000, "jobs that wait at each look", smallest=60),
    exclusive_cores=True,
)


@dataclass(slots=True, kw_only=True)
class SimulatedFleet:
    """Workers that each draw one job at a time, and the jobs that wait for them.

    Args:
        start_s: Seconds until a started worker is ready.
        count: Workers at the beginning.
        most: Upper bound on workers; equal to `count` for a fixed fleet.
    """

    start_s: float
    count: int
    most: int
    now_s: float = 0.0
    device_s: float = 0.0
    """Seconds of devices so far, starts included."""
    in_time: list[bool] = field(default_factory=list)
    """Whether each job that ended was in time."""
    _ready: int = field(init=False)
    _starting: list[float] = field(default_factory=list)
    """When each starting worker is ready."""
    _waiting: deque[tuple[float, float]] = field(default_factory=deque)
    """Arrival and seconds of each job."""
    _ends: list[float] = field(default_factory=list)
    """When each busy worker is idle again."""
    _jobs: ArrivalRate = field(default_factory=ArrivalRate)
    _seconds: ArrivalRate = field(default_factory=ArrivalRate)
    _target: TargetCount = field(init=False)

    def __post_init__(self) -> None:
        self._ready = self.count
        self._target = TargetCount(self.count, 0.0)

    def run(self, jobs: list[tuple[float, float]], *, wait_s: float = 10.0, keep_s: float = 60.0) -> None:
        """Draw all jobs, given by arrival and seconds."""
        coming = deque(jobs)
        while coming or self._waiting or self._ends:
            while coming and coming[0][0] < self.now_s:
                at_s, seconds = coming.popleft()
                self._waiting.append((at_s, seconds))
                self._jobs.note(1.0, self.now_s)
                self._seconds.note(seconds, self.now_s)
            self._draw()
            if self.most > self.count:
                self._scale(wait_s=wait_s, keep_s=keep_s)
            self.device_s += self._ready + len(self._starting)
            self.now_s += 1.0

    def _draw(self) -> None:
        self._ready += sum(at_s <= self.now_s for at_s in self._starting)
        self._starting = [at_s for at_s in self._starting if at_s > self.now_s]
        while self._ends and self._ends[0] <= self.now_s:
            heapq.heappop(self._ends)
        while self._waiting and len(self._ends) < self._ready:
            at_s, seconds = self._waiting.popleft()
            # An idle worker begins when the job comes, within this second.
            heapq.heappush(self._ends, max(at_s, self.now_s - 1.0) + seconds)
            self.in_time.append(max(at_s, self.now_s - 1.0) + seconds - at_s <= _IN_TIME * seconds)

    def _scale(self, *, wait_s: float, keep_s: float) -> None:
        work = Work(
            waiting=len(self._waiting),
            waiting_s=sum(seconds for _, seconds in self._waiting),
            running_s=tuple(end_s - self.now_s for end_s in self._ends),
            arriving=self._jobs.per_s(self.now_s),
            arriving_s=self._seconds.per_s(self.now_s),
        )
        starting_s = tuple(at_s - self.now_s for at_s in self._starting)
        supply = Supply(ready=self._ready, starting_s=starting_s, start_s=self.start_s)
        need = services_needed(work, supply, wait_s=wait_s)
        count = min(max(self._target.update(need, self.now_s, hold_s=max(keep_s, self.start_s)), 1), self.most)
        self._starting += [self.now_s + self.start_s] * (count - supply.count)
        surplus = max(0, supply.count - count)
        stopped = min(surplus, len(self._starting))
        del self._starting[len(self._starting) - stopped :]
        # A worker that draws ends its job first.
        self._ready -= min(surplus - stopped, self._ready - len(self._ends))


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Simulate fixed and scaled fleets, and measure decisions."""
    del folder
    for most in options.workers:
        _compare(most, options, sheet)
    for workers in options.workers:
        for trace, what in ((True, "the trace's jobs"), (False, "edits")):
            taken = decision_times_s(looks=options.looks, workers=workers, queued=options.queued, trace=trace)
            times_ms = [1e3 * seconds for seconds in taken]
            kind = "trace" if trace else "edits"
            sheet.row(f"a decision of {what}, {workers} workers, p50", f"{percentile(times_ms, 0.5):.2f} ms")
            bar = f"at most {WANTED_DECISION_MS:g} ms" if workers == max(WORKERS) else ""
            p99 = percentile(times_ms, 0.99)
            sheet.figure("    p99", p99, "{:.2f} ms", key=f"decision_{kind}_{workers}_p99_ms", bar=bar)


def _compare(most: int, options: argparse.Namespace, sheet: Sheet) -> None:
    """Add the figures of one fleet, over all seeds."""
    runs = [_run(most, options, seed) for seed in range(options.seeds)]
    device_s = fmean(run.scaled.device_s for run in runs)
    sheet.row(f"up to {most} workers: device seconds scaled, starts included", f"{device_s:,.0f}")
    saved = [run.scaled.device_s / run.for_bursts.device_s for run in runs]
    what = f"    over {most} fixed workers'"
    sheet.figure(what, fmean(saved), _spread(saved, "{:.2f}"), key=f"device_share_{most}", bar="at most 0.5")
    scaled, for_bursts, equal = (
        [_share(fleet) for fleet in side]
        for side in zip(*((run.scaled, run.for_bursts, run.equal) for run in runs), strict=True)
    )
    counts = sorted(run.equal.count for run in runs)
    fixed = f"{counts[0]} to {counts[-1]} fixed, of equal device seconds"
    for name, shares in (("scaled", scaled), ("fixed for bursts", for_bursts), (fixed, equal)):
        sheet.row(f"    jobs in time, {name}", _spread(shares, "{:.3f}").format(fmean(shares)))
    gains = [ours - theirs for ours, theirs in zip(scaled, equal, strict=True)]
    what = "    scaled more than fixed at equal seconds"
    sheet.figure(what, fmean(gains), _spread(gains, "{:.3f}"), key=f"gain_{most}", bar="above 0")
    sheet.values |= {f"in_time_{most}": fmean(scaled), f"in_time_for_bursts_{most}": fmean(for_bursts)}


def _spread(values: Sequence[float], form: str) -> str:
    """Return a format of the mean that names the least and the largest value."""
    return form + f" ({form.format(min(values))} to {form.format(max(values))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The fleets that drew the same jobs."""

    scaled: SimulatedFleet
    for_bursts: SimulatedFleet
    equal: SimulatedFleet
    """A fixed fleet of as many device seconds as the scaled one's."""


def _run(most: int, options: argparse.Namespace, seed: int) -> _Run:
    length_s, chance = 60.0 * options.minutes, random.Random(f"scaling {most} {seed}")
    seconds = _job_seconds(chance)
    mean_s = sum(next(seconds) for _ in range(2000)) / 2000
    share = _BURST.length_s / _BURST.every_s
    rate = _BURST_LOAD * most / mean_s * (1 - share + share * _BURST.times) / _BURST.times
    times = arrival_times(ArrivalShape(bursts=_BURST), rate_per_s=rate, length_s=length_s, chance=chance)
    jobs = [(at_s, next(seconds)) for at_s in times]
    scaled = SimulatedFleet(start_s=options.start_s, count=max(1, round(0.2 * most)), most=most)
    for_bursts = SimulatedFleet(start_s=0.0, count=most, most=most)
    scaled.run(jobs)
    for_bursts.run(jobs)
    equal_count = max(1, round(scaled.device_s / scaled.now_s))
    equal = SimulatedFleet(start_s=0.0, count=equal_count, most=equal_count)
    equal.run(jobs)
    return _Run(scaled=scaled, for_bursts=for_bursts, equal=equal)


def _share(fleet: SimulatedFleet) -> float:
    return sum(fleet.in_time) / len(fleet.in_time)


def _job_seconds(chance: random.Random) -> Iterator[float]:
    """Yield the seconds that jobs of the trace take alone, without end."""
    nets, loras = CONTROLNETS_B.draw(chance, least=0), LORAS_B.draw(chance, least=0)
    for used, merged in zip(nets, loras, strict=False):
        slowdown = 1.0 + _CONTROLNET_SHARE * len(used) + _LORA_SHARE * len(merged)
        yield chance.choice(_STEPS) * _STEP_S * slowdown + _FIXED_S


if __name__ == "__main__":
    sys.exit(BENCH.command())
