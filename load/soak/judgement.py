"""The result of a soak, and whether it is good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from load.bench.framework import Sheet
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
    """The result of a soak."""

    samples: list[Sample] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    replayed: Replay[PlannedRequest]
    completed: Counter[str]
    """By request, how often a gateway has logged it as completed."""

    @property
    def lost(self) -> int:
        """The requests that went out, and of which no picture came.

        Refused ones count: a soak asks for less than its suite can draw, and clients ask again for longer than a fault
        lasts; and a job that was taken ends so where a service that came back late leaves no time for it.
        """
        return sum(self.replayed.outcomes[outcome] for outcome in _LOST)

    @property
    def double(self) -> int:
        """The completions beyond the first of a request."""
        return sum(times - 1 for times in self.completed.values())

    @property
    def answered_well(self) -> bool:
        """Whether what was planned was asked for, and each request has its one picture."""
        return self.replayed.void is None and not (self.lost or self.double)


def judge(soaked: Soaked, length_s: float) -> bool:
    """Report, and return whether all bars are met.

    Raises ValueError where samples are too few to tell whether something has grown.
    """
    found = levels(soaked.samples, length_s)
    sheet, replayed = Sheet("soak"), soaked.replayed
    sheet.values |= {"minutes": length_s / 60.0, "requests": len(replayed.answers)}
    for name, level in found.items():
        size, unit = _UNITS[name]
        label = name.removesuffix("_bytes")
        before, after = (f"{value / size:,.1f}" for value in level)
        sheet.row(f"{label}: full, at the end", f"{before}, {after} {unit}".rstrip())
        bar = f"at most {WANTED_GROWTH:+.0%}"
        sheet.figure("  grown", growth(level), "{:+.2%}", key=f"growth_{label}", bar=bar)
    for fault, times in sorted(soaked.faults.items()):
        sheet.row(f"{fault} a service", str(times))
    sheet.row("answered", f"{replayed.outcomes[Outcome.ANSWERED]} of {len(replayed.answers)}")
    for (outcome, reason), times in sorted(replayed.reasons.items()):
        sheet.row(f"  {outcome}: {reason}", str(times))
    sheet.row("went out on time, of those planned", f"{replayed.achieved_rate / replayed.offered_rate:.2%}", "99 %")
    sheet.row("p50, p99", f"{replayed.latency_s(50):.2f}, {replayed.latency_s(99):.2f} s")
    for name, value in (("lost", soaked.lost), ("double", soaked.double)):
        sheet.row(name, str(value), "0")
        sheet.values[name] = value
    sheet.values["faults"] = sum(soaked.faults.values())
    if replayed.void is not None:
        print(replayed.void, flush=True)
    sheet.report()
    return soaked.answered_well and all(growth(level) <= WANTED_GROWTH for level in found.values())
