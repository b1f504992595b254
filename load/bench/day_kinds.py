"""Which of a day's requests took how long: by what they are, and the slowest ones with where their time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from load.bench.day_figures import IN_TIME, Comparison, Scale
from load.bench.day_requests import RequestClass
from load.bench.report import percentile
from load.replay.requests import PlannedRequest
from load.replay.results import Answer

_SLOWEST = 5
# Stages of a request that take less than this share of its time explain nothing.
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Of one side. in_time: the share that was answered in time."""

    p50_s: float
    p95_s: float
    in_time: float

    @classmethod
    def of(cls, answers: Sequence[Answer[PlannedRequest]], scale: Scale) -> Took:
        """Of some requests, one at least."""
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
    """Requests of one kind. alone_s: the mean of what they take alone on the plain server. turns_s: of their parts of
    the suite's turns, those included that were not drawn.
    """

    name: str
    requests: int
    alone_s: float
    turns_s: float
    plain: Took
    suite: Took


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRow:
    """One of the suite's slowest requests. plain_s, suite_s: what both sides took. stages: seconds of the suite's."""

    request: PlannedRequest
    alone_s: float
    plain_s: float
    suite_s: float
    stages: Mapping[str, float]

    @property
    def where(self) -> str:
        """The stages that took most of it, in words; empty where none is known, as of one that was not answered."""
        found = sorted(self.stages.items(), key=lambda stage: -stage[1])
        return ", ".join(f"{name} {s:.1f}" for name, s in found if s >= _LEAST_SHARE * self.suite_s)


def kinds(comparison: Comparison) -> list[KindRow]:
    """Of all days; a kind that no request has is left out."""
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
    """Of the suite's requests of all days, the slowest first."""
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
