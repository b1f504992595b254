"""What a day's runs come to: who was answered in time, how long all of them took, and at what cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from load.bench.day_requests import RequestClass
from load.bench.day_techniques import Uses
from load.bench.report import percentile
from load.replay.requests import PlannedRequest
from load.replay.results import Answer, Outcome, Replay

IN_TIME = 3.0
"""Times what a request takes alone in which its answer is worth something."""

PLAIN, SUITE = "plain", "suite"
WANTED = {"goodput_ratio": 1.5, "p95_ratio": 1.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRun:
    """One side's day. processor_s: of all its processes. uses: of the suite."""

    replayed: Replay[PlannedRequest]
    processor_s: float
    uses: Uses = field(default_factory=Uses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """By what answers are measured. alone_s: of each class on the plain server. deadline_s: what one that did not come
    counts as.
    """

    alone_s: Mapping[RequestClass, float]
    deadline_s: float

    def took_s(self, answer: Answer[PlannedRequest]) -> float:
        """From when it was meant to be sent."""
        return answer.latency_s if answer.outcome is Outcome.ANSWERED else self.deadline_s

    def slowdown(self, answer: Answer[PlannedRequest]) -> float:
        """Times what it takes alone; infinite where it was not answered."""
        if answer.outcome is not Outcome.ANSWERED:
            return math.inf
        return answer.latency_s / self.alone_s[RequestClass.of(answer.request)]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one side, over all of its days."""

    runs: Sequence[DayRun]
    scale: Scale

    @cached_property
    def answers(self) -> tuple[Answer[PlannedRequest], ...]:
        """Of all days."""
        return tuple(answer for run in self.runs for answer in run.replayed.answers)

    @cached_property
    def slowdowns(self) -> list[float]:
        """Of all requests, the least first."""
        return sorted(map(self.scale.slowdown, self.answers))

    @property
    def good(self) -> int:
        """Answers in time."""
        return sum(slowdown <= IN_TIME for slowdown in self.slowdowns)

    @property
    def good_share(self) -> float:
        """Of all requests."""
        return self.good / len(self.answers)

    @property
    def answered(self) -> int:
        """Also those that came late."""
        return sum(answer.outcome is Outcome.ANSWERED for answer in self.answers)

    def latency_s(self, share: float) -> float:
        """That at least this share of all requests does not exceed; the deadline stands for those not answered."""
        return percentile([self.scale.took_s(answer) for answer in self.answers], share)

    @property
    def per_core_minute(self) -> float:
        """Pictures for a minute of a core's time that the side used."""
        return self.answered / (sum(run.processor_s for run in self.runs) / 60.0)

    @property
    def void(self) -> list[str]:
        """Why a run says nothing, for each that does not."""
        return [run.replayed.void for run in self.runs if run.replayed.void]

    @property
    def reasons(self) -> list[str]:
        """Why requests were not answered, and how many."""
        counted: Counter[tuple[Outcome, str]] = sum((run.replayed.reasons for run in self.runs), Counter())
        return [f"{count} {outcome}: {reason}" for (outcome, reason), count in sorted(counted.items())]

    @property
    def uses(self) -> list[str]:
        """What the techniques did on its first day."""
        return list(self.runs[0].uses.said())


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both sides, and the suite's day without each technique, by its name: the same day as the first one of `suite`."""

    plain: Figures
    suite: Figures
    without: Mapping[str, Figures]

    @property
    def goodput_ratio(self) -> float:
        """Answers in time, the suite's over the plain server's; none in time counts as one."""
        return self.suite.good / max(1, self.plain.good)

    @property
    def p95_ratio(self) -> float:
        """The plain server's over the suite's."""
        return self.plain.latency_s(0.95) / self.suite.latency_s(0.95)

    @property
    def first_day(self) -> Figures:
        """The suite's, which days without a technique are compared with."""
        return Figures(runs=self.suite.runs[:1], scale=self.suite.scale)

    def worth(self, name: str) -> tuple[float, float]:
        """What a technique was worth that day: times as many answers in time as without it, and the p95 without it
        over that with it.
        """
        off, on = self.without[name], self.first_day
        return on.good / max(1, off.good), off.latency_s(0.95) / on.latency_s(0.95)

    @property
    def void(self) -> list[str]:
        """Sides that say nothing, and why."""
        sides = {
            PLAIN: self.plain,
            SUITE: self.suite,
            **{f"without {name}": each for name, each in self.without.items()},
        }
        return [f"{name}: {why}" for name, each in sides.items() for why in each.void]

    def values(self) -> dict[str, float]:
        """What the line of JSON says."""
        values = {"goodput_ratio": self.goodput_ratio, "p95_ratio": self.p95_ratio, "void_runs": len(self.void)}
        for side, each in ((PLAIN, self.plain), (SUITE, self.suite)):
            values |= {
                f"{side}_good_share": each.good_share,
                f"{side}_answered_share": each.answered / len(each.answers),
                f"{side}_p50_s": each.latency_s(0.5),
                f"{side}_p95_s": each.latency_s(0.95),
                f"{side}_p99_s": each.latency_s(0.99),
                f"{side}_images_per_core_minute": each.per_core_minute,
            }
        for name, each in self.without.items():
            goodput, p95 = self.worth(name)
            values |= {
                f"{name}_goodput_gain": goodput,
                f"{name}_p95_gain": p95,
                f"{name}_off_p95_s": each.latency_s(0.95),
            }
        return values | {"requests": len(self.suite.answers)}
