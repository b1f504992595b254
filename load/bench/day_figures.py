"""The figures of a day's runs: which requests were answered in time, how long all of them took, and at what cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bottega.client import Picture
from load.bench.day_requests import RequestClass
from load.bench.framework import percentile
from load.replay.requests import PlannedRequest
from load.replay.results import Answer, Outcome, Replay

IN_TIME = 3.0
"""An answer counts that comes within so many times what its request takes alone."""

PLAIN, SUITE = "plain", "suite"
WANTED = {"goodput_ratio": 1.5, "p95_ratio": 1.5}
# Stages that each request of a shared turn has in full.
_TURNS = ("denoise", "batch", "controlnets")
_SLOWEST = 5
# Stages of a request that take less than this share of its time explain nothing.
_LEAST_SHARE = 0.05


@dataclass(slots=True, kw_only=True)
class Uses:
    """Sums over the provenances of a run's pictures."""

    pictures: int = 0
    identical: int = 0
    """Pictures that were not drawn."""
    cached: int = 0
    """Pictures that started from a latent."""
    steps: int = 0
    """Denoising steps that were asked for."""
    skipped: int = 0
    """Steps that cached latents stood for."""
    blocks: int = 0
    """Transformer blocks of edits."""
    reused: int = 0
    """Blocks of which the masked part alone was computed."""
    late: int = 0
    """Pictures of which a LoRA came after the first step."""
    served: int = 0
    """Pictures with ControlNets that a server ran."""
    requests: float = 0.0
    """Requests that steps had together, summed over the pictures that were drawn."""
    stages: dict[PlannedRequest, dict[str, float]] = field(default_factory=dict)
    """Seconds of each request by stage."""
    turns_s: dict[PlannedRequest, float] = field(default_factory=dict)
    """Seconds of the worker's turns that a request had to itself; those who share one have equal parts of it."""

    def add(self, request: PlannedRequest, picture: Picture) -> None:
        """Add a picture."""
        made = picture.provenance
        stages = self.stages[request] = {time.stage: time.seconds for time in made.times}
        self.turns_s[request] = sum(stages.get(name, 0.0) for name in _TURNS) / max(1.0, made.mean_group_requests)
        self.pictures += 1
        self.steps += made.parameters.num_inference_steps
        if made.identical_job:
            self.identical += 1
            return
        self.cached += bool(made.cached_starts)
        self.skipped += sum(start.skipped_steps for start in made.cached_starts)
        self.blocks += made.blocks_total
        self.reused += made.blocks_reused
        self.late += any(lora.from_step > made.begin_step for lora in made.loras)
        self.served += any(server != made.worker for net in made.controlnets for server in net.servers)
        self.requests += made.mean_group_requests

    def notes(self) -> Iterator[str]:
        """Yield each technique that took part, in words."""
        if self.identical:
            yield f"{self.identical} answered with a stored picture"
        if self.cached:
            yield f"{self.cached} from cached latents ({self.skipped / self.steps:.0%} of all steps spared)"
        if self.reused:
            yield f"{self.reused / self.blocks:.0%} of edits' blocks masked"
        if self.served:
            yield f"{self.served} with ControlNets of a server"
        if self.late:
            yield f"{self.late} with LoRAs that came late"
        if drawn := self.pictures - self.identical:
            yield f"{self.requests / drawn:.1f} requests a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRun:
    """A day of one side."""

    replayed: Replay[PlannedRequest]
    processor_s: float
    """Of all its processes."""
    uses: Uses = field(default_factory=Uses)
    """Of the suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The times that answers are compared with."""

    alone_s: Mapping[RequestClass, float]
    """Seconds of each class on the plain server."""
    deadline_s: float
    """What an answer counts as that did not come."""

    def took_s(self, answer: Answer[PlannedRequest]) -> float:
        """Return the seconds from when the request was meant to be sent."""
        return answer.latency_s if answer.outcome is Outcome.ANSWERED else self.deadline_s

    def slowdown(self, answer: Answer[PlannedRequest]) -> float:
        """Return the seconds over those alone; infinite where the request was not answered."""
        if answer.outcome is not Outcome.ANSWERED:
            return math.inf
        return answer.latency_s / self.alone_s[RequestClass.of(answer.request)]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A side, over all of its days."""

    runs: Sequence[DayRun]
    scale: Scale

    @cached_property
    def answers(self) -> tuple[Answer[PlannedRequest], ...]:
        """Answers of all days."""
        return tuple(answer for run in self.runs for answer in run.replayed.answers)

    @cached_property
    def slowdowns(self) -> list[float]:
        """Slowdowns of all requests, the least first."""
        return sorted(map(self.scale.slowdown, self.answers))

    @property
    def good(self) -> int:
        """Answers in time."""
        return sum(slowdown <= IN_TIME for slowdown in self.slowdowns)

    @property
    def good_share(self) -> float:
        """The share of all requests that was answered in time."""
        return self.good / len(self.answers)

    @property
    def answered(self) -> int:
        """Answers, also those that came late."""
        return sum(answer.outcome is Outcome.ANSWERED for answer in self.answers)

    def latency_s(self, share: float) -> float:
        """Return the seconds that at least this share of all requests does not exceed."""
        return percentile([self.scale.took_s(answer) for answer in self.answers], share)

    @property
    def per_core_minute(self) -> float:
        """Pictures for a minute of a core's time that the side used."""
        return self.answered / (sum(run.processor_s for run in self.runs) / 60.0)

    @property
    def void(self) -> list[str]:
        """The reasons why runs are void."""
        return [run.replayed.void for run in self.runs if run.replayed.void]

    @property
    def reasons(self) -> list[str]:
        """The reasons why requests were not answered, and how many."""
        counted: Counter[tuple[Outcome, str]] = sum((run.replayed.reasons for run in self.runs), Counter())
        return [f"{count} {outcome}: {reason}" for (outcome, reason), count in sorted(counted.items())]

    @property
    def uses(self) -> list[str]:
        """The uses of techniques on its first day."""
        return list(self.runs[0].uses.notes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The sides, and the suite without each technique, by its name, on the first day of `suite`."""

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
        """The suite's first day, with which days without a technique are compared."""
        return Figures(runs=self.suite.runs[:1], scale=self.suite.scale)

    def worth(self, name: str) -> tuple[float, float]:
        """Return a technique's gain that day: of answers in time, and of the p95."""
        off, on = self.without[name], self.first_day
        return on.good / max(1, off.good), off.latency_s(0.95) / on.latency_s(0.95)

    @property
    def void(self) -> list[str]:
        """Sides that are void, and why."""
        sides = {PLAIN: self.plain, SUITE: self.suite}
        sides |= {f"without {name}": each for name, each in self.without.items()}
        return [f"{name}: {why}" for name, each in sides.items() for why in each.void]

    def values(self) -> dict[str, float]:
        """Return the figures for programs."""
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
            values |= {f"{name}_goodput_gain": goodput, f"{name}_p95_gain": p95}
            values[f"{name}_off_p95_s"] = each.latency_s(0.95)
        return values | {"requests": len(self.suite.answers)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds of some requests on one side, and the share that was answered in time."""

    p50_s: float
    p95_s: float
    in_time: float

    @classmethod
    def of(cls, answers: Sequence[Answer[PlannedRequest]], scale: Scale) -> Took:
        """Return those of some requests, one at least."""
        took_s = [scale.took_s(answer) for answer in answers]
        return cls(
            p50_s=percentile(took_s, 0.5),
            p95_s=percentile(took_s, 0.95),
            in_time=sum(scale.slowdown(answer) <= IN_TIME for answer in answers) / len(answers),
        )

    def __str__(self) -> str:
        return f"{self.p50_s:.1f} s, {self.p95_s:.1f} s, {self.in_time:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow:
    """Requests of one kind."""

    name: str
    requests: int
    alone_s: float
    """Mean seconds alone on the plain server."""
    turns_s: float
    """Mean seconds of their parts of the suite's turns, those included that were not drawn."""
    plain: Took
    suite: Took


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRow:
    """A request that is one of the suite's slowest."""

    request: PlannedRequest
    alone_s: float
    plain_s: float
    suite_s: float
    stages: Mapping[str, float]
    """Seconds of the suite's stages."""

    @property
    def where(self) -> str:
        """The stages that took most of it, in words; empty where none is known, as of one that was not answered."""
        found = sorted(self.stages.items(), key=lambda stage: -stage[1])
        return ", ".join(f"{name} {s:.1f}" for name, s in found if s >= _LEAST_SHARE * self.suite_s)


def kinds(comparison: Comparison) -> list[KindRow]:
    """Return the kinds of requests of all days, the most frequent first."""
    scale = comparison.suite.scale
    turns_s = {request: found for run in comparison.suite.runs for request, found in run.uses.turns_s.items()}
    both: dict[str, list[tuple[Answer[PlannedRequest], Answer[PlannedRequest]]]] = {}
    for pair in zip(comparison.plain.answers, comparison.suite.answers, strict=True):
        both.setdefault(_kind(pair[0].request), []).append(pair)
    return [
        KindRow(
            name=name,
            requests=len(pairs),
            alone_s=sum(scale.alone_s[RequestClass.of(plain.request)] for plain, _ in pairs) / len(pairs),
            turns_s=sum(turns_s.get(suite.request, 0.0) for _, suite in pairs) / len(pairs),
            plain=Took.of([plain for plain, _ in pairs], scale),
            suite=Took.of([suite for _, suite in pairs], scale),
        )
        for name, pairs in sorted(both.items(), key=lambda kind: -len(kind[1]))
    ]


def slowest(comparison: Comparison) -> list[SlowRow]:
    """Return the suite's slowest requests of all days, the slowest first."""
    scale = comparison.suite.scale
    stages = {request: found for run in comparison.suite.runs for request, found in run.uses.stages.items()}
    rows = [
        SlowRow(
            request=suite.request,
            alone_s=scale.alone_s[RequestClass.of(suite.request)],
            plain_s=scale.took_s(plain),
            suite_s=scale.took_s(suite),
            stages=stages.get(suite.request, {}),
        )
        for plain, suite in zip(comparison.plain.answers, comparison.suite.answers, strict=True)
    ]
    return sorted(rows, key=lambda row: -row.suite_s)[:_SLOWEST]


def _kind(request: PlannedRequest) -> str:
    if request.kind == "edit":
        return "edits"
    return "draws with ControlNets" if request.controlnets else "draws without ControlNets"
