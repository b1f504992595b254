"""What came of a soak, and whether that is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from load.bench.report import report
from load.replay.requests import PlannedRequest
from load.replay.results import Outcome, Replay
from load.soak.levels import WANTED_GROWTH, Sample, growth, levels

_MIB = 1 << 20
_UNITS: Mapping[str, tuple[float, str]] = {
    "memory_bytes": (_MIB, "MiB"),
    "descriptors": (1, ""),
    "shared_bytes": (_MIB, "MiB"),
    "disk_bytes": (_MIB, "MiB"),
}
# Of a request that went out, each of these is one of which no picture came.
_LOST = (Outcome.FAILED, Outcome.LATE, Outcome.REFUSED)


@dataclass(slots=True, kw_only=True)
class Soaked:
    """What came of it. completed: by request, how often a gateway has logged it so."""

    samples: list[Sample] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    replayed: Replay[PlannedRequest]
    completed: Counter[str]

    @property
    def lost(self) -> int:
        """Requests that went out, and of which no picture came.

        Refused ones, too: a soak asks for less than its suite can draw, and clients ask again for longer than a fault
        lasts; and a job that was taken ends so where a service that came back late leaves no time for it.
        """
        return sum(self.replayed.outcomes[outcome] for outcome in _LOST)

    @property
    def double(self) -> int:
        """Completions beyond the first of a request."""
        return sum(times - 1 for times in self.completed.values())

    @property
    def answered_well(self) -> bool:
        """Whether what was planned was asked for, and each request has its one picture."""
        return self.replayed.void is None and not (self.lost or self.double)


def judge(soaked: Soaked, length_s: float) -> bool:
    """Reports it, and returns whether all is as it has to be.

    Raises ValueError where samples are too few to say whether something has grown.
    """
    found = levels(soaked.samples, length_s)
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float] = {"minutes": length_s / 60.0, "requests": len(soaked.replayed.answers)}
    for name, level in found.items():
        unit, said = _UNITS[name]
        grown = growth(level)
        before, after = (f"{value / unit:,.1f}" for value in level)
        rows.append((f"{name.removesuffix('_bytes')}: full, at the end", f"{before}, {after} {said}".rstrip(), ""))
        wanted = f"at most {WANTED_GROWTH:+.0%}"
        rows.append((f"  grown (growth_{name.removesuffix('_bytes')})", f"{grown:+.2%}", wanted))
        values[f"growth_{name.removesuffix('_bytes')}"] = round(grown, 4)
    for fault, times in sorted(soaked.faults.items()):
        rows.append((f"{fault} a service", str(times), ""))
    replayed = soaked.replayed
    rows.append(("answered", f"{replayed.outcomes[Outcome.ANSWERED]} of {len(replayed.answers)}", ""))
    for (outcome, reason), times in sorted(replayed.reasons.items()):
        rows.append((f"  {outcome}: {reason}", str(times), ""))
    rows.append(("went out on time, of those planned", f"{replayed.achieved_rate / replayed.offered_rate:.2%}", "99 %"))
    rows.append(("p50, p99", f"{replayed.latency_s(50):.2f}, {replayed.latency_s(99):.2f} s", ""))
    for name, value in (("lost", soaked.lost), ("double", soaked.double)):
        rows.append((name, str(value), "0"))
        values[name] = value
    values["faults"] = sum(soaked.faults.values())
    if replayed.void is not None:
        print(replayed.void, flush=True)
    report("soak", rows, values)
    return soaked.answered_well and all(growth(level) <= WANTED_GROWTH for level in found.values())
