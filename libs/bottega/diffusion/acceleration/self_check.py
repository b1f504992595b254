"""The self-check: what a worker keeps of its accelerations, by what they do on its own device and model.

One after the other, on top of those that are kept: plain and accelerated results are compared and timed, by turns where
one turn leaves a doubt. What is slower, differs, fails or does not go away again is off. Knows no engine: it runs
probes.
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

from bottega.diffusion.acceleration.acceleration import Acceleration, AccelerationResult, Probe
from bottega.diffusion.acceleration.trial_log import TrialLog
from bottega.diffusion.model.model import Model
from bottega.errors import BottegaError, InternalError

_log = logging.getLogger(__name__)

# Below, a difference is as likely chance, and an acceleration that is kept can still hurt at other sizes.
LEAST_SPEEDUP = 1.03
# Timed runs of each way in a turn, and untimed ones before them, which pay for what is made once: graphs are recorded
# at the third use.
_RUNS = 3
_WARM_UP_RUNS = 3
# A machine drifts by more than what is looked for. Near the least that counts, both ways take turns, and the medians of
# all runs are compared: the more turns, the nearer it may be (with one turn, starts of one model had .98 and 1.02).
_MOST_TURNS = 4
# Share by which a speed-up may differ from LEAST_SPEEDUP after one turn and still be chance; an n-th of it after n.
_DOUBT = 0.15
_MOST_REASON = 200
# After so many engines that ended while something was tried, the next one tries nothing: it has to start.
_MOST_FATAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckSettings:
    """synchronize: waits until the device has computed what it was given. beat: called between two runs, see Heartbeat.

    deadline_s: after which nothing more is tried: the turn that is under way then ends, and what was measured decides.
    """

    synchronize: Callable[[], None]
    beat: Callable[[], None]
    deadline_s: float
    clock: Callable[[], float] = perf_counter


class SelfCheck:
    """probes: by name. log: of what is tried, so that one that ends the process is not tried by the next one."""

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
        """What was found of each, in their order; those that are kept are enabled from now on.

        Raises InternalError where one cannot be taken out again: nothing that is drawn then could be trusted. Raises
        RuntimeError where the device computes nothing any more. The log has its name then, and the next process starts.
        """
        ends_s = self._settings.clock() + self._settings.deadline_s
        results: list[AccelerationResult] = []
        for number, candidate in enumerate(candidates):
            kept = {each.name for each in results if each.kept}
            reason = self._not_tried(candidate, kept, ends_s)
            result = AccelerationResult(name=candidate.name, kept=False, reason=reason) if reason else None
            results.append(result or self._try(candidate, self._part_of(ends_s, len(candidates) - number)))
            _log_result(results[-1])
        return results

    def _not_tried(self, candidate: Acceleration, kept: set[str], ends_s: float) -> str:
        """Why a candidate is not tried at all; empty where it is."""
        unsupported = candidate.unsupported(self._model)
        if unsupported:
            return unsupported
        instead = sorted(kept.intersection(candidate.excludes))
        if instead:
            return f"{instead[0]} is kept instead"
        if candidate.probe not in self._probes:
            return f"nothing here shows what it gains ({candidate.probe})"
        if candidate.name in self._trials.fatal:
            return "an engine ended while it was tried"
        if len(self._trials.fatal) >= _MOST_FATAL:
            return f"engines ended while {', '.join(sorted(self._trials.fatal))} were tried: nothing more is tried"
        if self._settings.clock() >= ends_s:
            return "no time was left to try it (self_check_s)"
        return ""

    def _part_of(self, ends_s: float, candidates: int) -> float:
        """When the first of so many that are left has had its part of the time: others are to have theirs."""
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
                except Exception as error:  # noqa: BLE001 - the boundary of a trial: the plain way needs none of it
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
            self._plain[candidate.probe] = (wanted, plain[-1])  # of the next candidate, if this one is not kept
            if result.kept:
                candidate.enable(self._model)
                self._plain.clear()  # the next one is tried on top of it
                self._run(self._probes[candidate.probe])
            return result

    def _measure_plain(self, probe: str) -> tuple[Sequence[Tensor], Sequence[float]]:
        """Result and seconds without the candidate, those of the last measurement where nothing has changed since."""
        if probe not in self._plain:
            self._plain[probe] = self._measure(self._probes[probe])
        return self._plain[probe]

    def _check_plain(self, candidate: Acceleration, wanted: Sequence[Tensor]) -> Sequence[float]:
        """Seconds of the plain way after a trial. Raises InternalError where its result is another one now."""
        got, seconds = self._measure(self._probes[candidate.probe])
        difference = _difference(wanted, got)
        if not difference <= candidate.tolerance:
            raise InternalError(
                f"{candidate.name} was taken out again, and results still differ by {difference:.2g}: leave it out of "
                "engine.accelerations"
            )
        return seconds

    def _measure(self, probe: Probe) -> tuple[Sequence[Tensor], Sequence[float]]:
        """What a probe makes in the last of its timed runs, and the seconds of each of them."""
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
        # Copies: a graph, for one, puts its next result in the same place.
        return [tensor.detach().clone() for tensor in made], max(seconds, 1e-9)


def _in_doubt(
    result: AccelerationResult, plain: Sequence[Sequence[float]], accelerated: Sequence[Sequence[float]]
) -> bool:
    """Whether the speed-up could be chance, on either side of the least that counts.

    plain, accelerated: seconds of the turns' runs. After one turn that of each plain measurement alone counts: one of
    them may have been slowed down by something else.
    """
    if not result.difference <= result.tolerance:
        return False
    speedups = [result.speedup]
    if len(accelerated) == 1:
        speedups = [median(each) / median(accelerated[0]) for each in plain]
    doubt = _DOUBT / len(accelerated)
    return min(speedups) < LEAST_SPEEDUP * (1 + doubt) and max(speedups) > LEAST_SPEEDUP * (1 - doubt)


def _compared(candidate: Acceleration, difference: float, speedup: float) -> AccelerationResult:
    reason = ""
    if not difference <= candidate.tolerance:
        reason = f"its results differ by {difference:.2g} of the largest, and {candidate.tolerance:g} is allowed"
    elif speedup < LEAST_SPEEDUP:
        reason = f"it is {speedup:.2f} times as fast here, and {LEAST_SPEEDUP:g} is the least that counts"
    return AccelerationResult(
        name=candidate.name,
        kept=not reason,
        speedup=speedup,
        difference=difference,
        tolerance=candidate.tolerance,
        reason=reason,
    )


def _difference(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """The largest difference as a share of the largest value; infinite where shapes differ, or NaN stands somewhere."""
    if [each.shape for each in wanted] != [each.shape for each in got]:
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
        _log.info("an acceleration is kept", extra=facts)
    else:
        _log.info("an acceleration is off", extra={**facts, "why": result.reason})
