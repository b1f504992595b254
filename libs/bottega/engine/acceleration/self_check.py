"""The list of accelerations, and the self-check, which tries them on the worker's own device and model.

Accelerations are tried one after the other, each together with those that were chosen before. The results and times of
probes with and without it are compared, in several rounds if the first is not clear. An acceleration that is slower,
differs, fails or cannot be disabled is not used. The self-check does not know the engine; it only runs probes.

A crash in a driver leaves no trace but a file that names the acceleration that is being tried, so that the crash can be
blamed on it. The processes of a worker's engine use the file one after the other. The worker's front process creates
and removes it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Self

import torch
from torch import Tensor

from bottega.engine.acceleration.acceleration import Acceleration, AccelerationResult, Probe
from bottega.engine.acceleration.graphs import Graphs
from bottega.engine.acceleration.kernels import Geglu, GroupNormSilu, GuidedEulerStep, LoraPatch, MaskedMoves
from bottega.engine.acceleration.torch_options import (
    AttentionBackend,
    ChannelsLast,
    FlashAttention,
    Float8Weights,
    PageableCopies,
    RegionalCompile,
)
from bottega.errors import BottegaError, ConfigError, InternalError
from bottega.model.model import Model

AUTO, OFF = "auto", "off"
# Accelerations that are tried only by name, and are used for the memory that they save even if they take longer.
_FOR_MEMORY = frozenset({Float8Weights.name})


def all_accelerations() -> list[Acceleration]:
    """Return new accelerations, not enabled, in the order in which they are tried on top of each other."""
    return [
        Float8Weights(),
        PageableCopies(),
        FlashAttention(),
        AttentionBackend("cudnn"),
        AttentionBackend("flash"),
        AttentionBackend("efficient"),
        GroupNormSilu("unet"),
        Geglu(),
        GroupNormSilu("vae"),
        LoraPatch(),
        MaskedMoves(),
        GuidedEulerStep(),
        # After the kernels: torch's own normalization on a GPU would change the layout of feature maps.
        ChannelsLast("unet"),
        ChannelsLast("vae"),
        RegionalCompile(),
        Graphs(),
    ]


def candidates(wanted: str | Sequence[str], model: Model) -> list[Acceleration]:
    """Return the accelerations to try on a model. Raise ConfigError for an unknown name.

    `wanted` is a list of names, "off" for none, or "auto", which on a CPU is none, and on a GPU all but those that save
    memory.
    """
    known = all_accelerations()
    if wanted == OFF or (wanted == AUTO and model.device.type == "cpu"):
        return []
    if wanted == AUTO:
        return [acceleration for acceleration in known if acceleration.name not in _FOR_MEMORY]
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = sorted(set(names) - {acceleration.name for acceleration in known})
    if unknown:
        available = ", ".join(acceleration.name for acceleration in known)
        raise ConfigError(
            f"engine.accelerations: unknown {', '.join(unknown)}; use auto, off, or names of: {available}"
        )
    return [acceleration for acceleration in known if acceleration.name in names]


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
    elif speedup < LEAST_SPEEDUP and candidate.name not in _FOR_MEMORY:
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


_log = logging.getLogger(__name__)


class TrialLog:
    """The log, in a file or only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        earlier = _read(path)
        self.fatal = frozenset(earlier)
        """Names of accelerations during whose trial an earlier process died."""
        self._write([*earlier])

    @classmethod
    def in_memory(cls) -> Self:
        """Return a log that exists only in this process."""
        return cls(None)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Name the acceleration in the file during the block, and leave it there if the block raises or crashes."""
        self._write([*self.fatal, name])
        yield
        self._write([*self.fatal])

    def _write(self, names: list[str]) -> None:
        """Write the file so that it survives a crash of the process, not of the machine. Failures are only logged."""
        if self._path is None:
            return
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(sorted(names)), encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            facts = {"file": str(self._path), "why": error.strerror, "tried": names}
            _log.warning(
                "cannot write the trial log: if a trial ends the engine process, the next one will repeat it",
                extra=facts,
            )


def _read(path: Path | None) -> list[str]:
    """Return the names in the file; none if it is missing or malformed."""
    if path is None or not path.is_file():
        return []
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
