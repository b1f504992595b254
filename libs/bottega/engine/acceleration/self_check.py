"""The self-check: tries accelerations on the worker's own device and model, and decides which ones it uses.

Accelerations are tried one after the other, each together with those that were chosen before. The results and times of
probes with and without it are compared, in several rounds if the first is not clear. An acceleration that is slower,
differs, fails or cannot be disabled is not used. The self-check does not know the engine; it only runs probes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from bottega.engine.acceleration.acceleration import Acceleration, AccelerationResult, Probe
from bottega.engine.acceleration.trial_log import TrialLog
from bottega.errors import BottegaError, InternalError
from bottega.model.model import Model

_log = logging.getLogger(__name__)

# A smaller gain may be chance, and an acceleration can make other sizes slower.
LEAST_SPEEDUP = 1.03
# Timed runs of each path in a round, and untimed ones before them for one-time work: graphs are recorded at the third
# use.
_RUNS = 3
_WARM_UP_RUNS = 3
# A machine's speed drifts by more than the gain that matters. Near LEAST_SPEEDUP, paths alternate and medians of all
# runs are compared. With more rounds, smaller differences count. (With one round, starts of a model had .98 and 1.02.)
_MOST_TURNS = 4
# Distance from LEAST_SPEEDUP below which another round follows after one round; divided by n after n rounds.
_DOUBT = 0.15
_MOST_REASON = 200
# After this many engine processes died in trials, the next one tries nothing, so that it starts.
_MOST_FATAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckSettings:
    """The environment of a self-check."""

    synchronize: Callable[[], None]
    """Waits until the device has finished."""
    beat: Callable[[], None]
    """Called between two runs of a probe, see `Heartbeat`."""
    deadline_s: float
    """Seconds after which no further acceleration is tried. The current one is judged by its measurements so far."""
    clock: Callable[[], float] = perf_counter


class SelfCheck:
    """Tries accelerations on a model.

    Args:
        log: Names the acceleration that is being tried. If the process dies, the next process does not try that one.
    """

    def __init__(
        self, model: Model, probes: Mapping[str, Probe], settings: SelfCheckSettings, log: TrialLog | None = None
    ) -> None:
        self._model = model
        self._probes = probes
        self._settings = settings
        self._trials = log or TrialLog.in_memory()
        self._plain: dict[str, tuple[Sequence[Tensor], Sequence[float]]] = {}

    @torch.inference_mode()
    def run(self, candidates: Sequence[Acceleration]) -> list[AccelerationResult]:
        """Try the candidates. Return their results in order, and leave those enabled that are used.

        Raise InternalError if one cannot be disabled, because later results could not be trusted, or RuntimeError if
        the device no longer computes. The log then names the candidate, and the next process does not try it.
        """
        ends_s = self._settings.clock() + self._settings.deadline_s
        results: list[AccelerationResult] = []
        for number, candidate in enumerate(candidates):
            kept = {result.name for result in results if result.kept}
            reason = self._not_tried(candidate, kept, ends_s)
            result = AccelerationResult(name=candidate.name, kept=False, reason=reason) if reason else None
            results.append(result or self._try(candidate, self._part_of(ends_s, len(candidates) - number)))
            _log_result(results[-1])
        return results

    def _not_tried(self, candidate: Acceleration, kept: set[str], ends_s: float) -> str:
        """Return why a candidate is not tried; "" if it is."""
        unsupported = candidate.unsupported(self._model)
        if unsupported:
            return unsupported
        instead = sorted(kept.intersection(candidate.excludes))
        if instead:
            return f"{instead[0]} is used instead"
        if candidate.probe not in self._probes:
            return f"nothing on this worker uses it: there is no probe {candidate.probe}"
        if candidate.name in self._trials.fatal:
            return "an engine process died while it was tried"
        if len(self._trials.fatal) >= _MOST_FATAL:
            return (
                f"engine processes died while {', '.join(sorted(self._trials.fatal))} were tried, so no more are tried"
            )
        if self._settings.clock() >= ends_s:
            return "no time was left to try it (self_check_s)"
        return ""

    def _part_of(self, ends_s: float, candidates: int) -> float:
        """Return when the next candidate's share of the remaining time ends."""
        now_s = self._settings.clock()
        return now_s + (ends_s - now_s) / candidates

    def _try(self, candidate: Acceleration, turns_end_s: float) -> AccelerationResult:
        wanted, plain_s = self._measure_plain(candidate.probe)
        plain, accelerated, difference = [plain_s], list[Sequence[float]](), 0.0
        with self._trials.trying(candidate.name):
            for _ in range(_MOST_TURNS):
                try:
                    candidate.enable(self._model)
                    got, seconds = self._measure(self._probes[candidate.probe])
                except Exception as error:  # noqa: BLE001 - any error only ends the trial
                    candidate.disable()
                    reason = f"it failed: {type(error).__name__}: {_first_line(error)}"
                    self._check_plain(candidate, wanted)
                    return AccelerationResult(name=candidate.name, kept=False, reason=reason)
                candidate.disable()
                accelerated.append(seconds)
                plain.append(self._check_plain(candidate, wanted))
                difference = max(difference, _difference(wanted, got))
                result = _compared(candidate, difference, median(chain(*plain)) / median(chain(*accelerated)))
                if not _in_doubt(result, plain, accelerated) or self._settings.clock() >= turns_end_s:
                    break
            self._plain[candidate.probe] = (wanted, plain[-1])  # Reused for the next candidate unless this one is used.
            if result.kept:
                candidate.enable(self._model)
                self._plain.clear()  # The next candidate is tried together with this one.
                self._run(self._probes[candidate.probe])
            return result

    def _measure_plain(self, probe: str) -> tuple[Sequence[Tensor], Sequence[float]]:
        """Return result and seconds of the plain path, measured once for each set of used accelerations."""
        if probe not in self._plain:
            self._plain[probe] = self._measure(self._probes[probe])
        return self._plain[probe]

    def _check_plain(self, candidate: Acceleration, wanted: Sequence[Tensor]) -> Sequence[float]:
        """Return the seconds of the plain path after a trial. Raise InternalError if its result has changed."""
        got, seconds = self._measure(self._probes[candidate.probe])
        difference = _difference(wanted, got)
        if not difference <= candidate.tolerance:
            raise InternalError(
                f"{candidate.name} was disabled, and results still differ by {difference:.2g}: leave it out of "
                "engine.accelerations"
            )
        return seconds

    def _measure(self, probe: Probe) -> tuple[Sequence[Tensor], Sequence[float]]:
        """Return a probe's last result and the seconds of each timed run."""
        for _ in range(_WARM_UP_RUNS):
            self._run(probe)
        runs = [self._run(probe) for _ in range(_RUNS)]
        return runs[-1][0], [seconds for _, seconds in runs]

    def _run(self, probe: Probe) -> tuple[Sequence[Tensor], float]:
        settings = self._settings
        settings.beat()
        settings.synchronize()
        began_s = settings.clock()
        made = probe()
        settings.synchronize()
        seconds = settings.clock() - began_s
        # Copied, because a graph overwrites its last result.
        return [tensor.detach().clone() for tensor in made], max(seconds, 1e-9)


def _in_doubt(
    result: AccelerationResult, plain: Sequence[Sequence[float]], accelerated: Sequence[Sequence[float]]
) -> bool:
    """Return whether chance may have moved the speed-up above or below LEAST_SPEEDUP.

    After one round, the speed-up over each plain measurement counts, because something else may have slowed down one of
    them.
    """
    if not result.difference <= result.tolerance:
        return False
    speedups = [result.speedup]
    if len(accelerated) == 1:
        speedups = [median(seconds) / median(accelerated[0]) for seconds in plain]
    doubt = _DOUBT / len(accelerated)
    return min(speedups) < LEAST_SPEEDUP * (1 + doubt) and max(speedups) > LEAST_SPEEDUP * (1 - doubt)


def _compared(candidate: Acceleration, difference: float, speedup: float) -> AccelerationResult:
    reason = ""
    if not difference <= candidate.tolerance:
        reason = f"its results differ by {difference:.2g} of the largest value, and {candidate.tolerance:g} is allowed"
    elif speedup < LEAST_SPEEDUP:
        reason = f"it is {speedup:.2f} times as fast here, and at least {LEAST_SPEEDUP:g} is required"
    return AccelerationResult(
        name=candidate.name,
        kept=not reason,
        speedup=speedup,
        difference=difference,
        tolerance=candidate.tolerance,
        reason=reason,
    )


def _difference(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Return the largest difference as a fraction of the largest value; infinity if results cannot be compared."""
    if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in got]:
        return math.inf
    worst = 0.0
    for plain, other in zip(wanted, got, strict=True):
        if not plain.numel():
            continue
        plain64, other64 = plain.double(), other.double()
        if not bool(torch.isfinite(other64).all()):
            return math.inf
        scale = max(float(plain64.abs().max()), 1e-12)
        worst = max(worst, float((plain64 - other64).abs().max()) / scale)
    return worst


def _first_line(error: Exception) -> str:
    text = error.message if isinstance(error, BottegaError) else str(error)
    return (text.strip().splitlines() or ["no reason given"])[0][:_MOST_REASON]


def _log_result(result: AccelerationResult) -> None:
    facts = {"acceleration": result.name, "speedup": round(result.speedup, 3), "difference": result.difference}
    if result.kept:
        _log.info("an acceleration is used", extra=facts)
    else:
        _log.info("an acceleration is not used", extra={**facts, "why": result.reason})
