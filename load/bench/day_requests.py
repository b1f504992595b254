"""What counts of a day's requests beside when they come: the kinds of which there are several, and how long they are.

A day is compressed: steps, bursts and the number of templates shrink with it, the shares and the shapes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from bottega.errors import ConfigError
from load.replay.mix import Mix, load_mix
from load.replay.plan import plan
from load.replay.requests import Kind, PlannedRequest

# Of the requests of a long day, so many are looked at to know which kinds there are, and how long they take.
_LOOKED_AT = 1000
_LEAST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """Requests that take equally long alone. controlnets, loras: how many of them."""

    kind: Kind
    steps: int
    controlnets: int
    loras: int

    @classmethod
    def of(cls, request: PlannedRequest) -> RequestClass:
        """That of a request."""
        return cls(
            kind=request.kind,
            steps=request.steps,
            controlnets=len(request.controlnets),
            loras=len(request.loras),
        )

    def __str__(self) -> str:
        add_ons = [_count(self.controlnets, "ControlNet"), _count(self.loras, "LoRA")]
        return ", ".join([self.kind, f"{self.steps} steps", *filter(None, add_ons)])


@dataclass(frozen=True, slots=True, kw_only=True)
class DayShape:
    """How a mix is compressed. mix: its name or file. minutes: that the day takes.

    steps_share: of the mix's denoising steps, those that are made. templates: that are edited. controlnets, loras:
    names, the most popular ones first.
    """

    mix: str
    minutes: float
    steps_share: float
    templates: int
    controlnets: Sequence[str]
    loras: Sequence[str]

    def requests(self, rate_per_s: float, seed: int) -> list[PlannedRequest]:
        """Of a whole day, at this rate on average. Raises ConfigError for a mix of which none can be made."""
        return [self._compressed(request) for request in plan(self.at(rate_per_s), seed)]

    def sample(self, seed: int) -> list[PlannedRequest]:
        """The first ones of a day, whatever its rate: more than it will have."""
        return self.requests(_LOOKED_AT / (60.0 * self.minutes), seed)

    def at(self, rate_per_s: float) -> Mix:
        """The compressed mix, but for its steps."""
        whole = load_mix(self.mix)
        scale = self.minutes / whole.minutes
        overrides: dict[str, Any] = {
            "minutes": self.minutes,
            "rate_per_s": rate_per_s,
            "edits": {"templates": self.templates},
            "controlnets": {"names": tuple(self.controlnets)},
            "loras": {"names": tuple(self.loras)},
        }
        if bursts := whole.arrivals.bursts:
            scaled = {"length_s": scale * bursts.length_s, "every_s": scale * bursts.every_s}
            overrides["arrivals"] = {"bursts": scaled}
        return load_mix(self.mix, overrides)

    def _compressed(self, request: PlannedRequest) -> PlannedRequest:
        if request.kind == "edit" and request.controlnets:
            raise ConfigError(
                f"the mix {self.mix} has edits with ControlNets, which this bench's plain server draws not"
            )
        return replace(request, steps=max(_LEAST_STEPS, round(self.steps_share * request.steps)))


def one_of_each(requests: Sequence[PlannedRequest]) -> dict[RequestClass, PlannedRequest]:
    """The first request of every class."""
    found: dict[RequestClass, PlannedRequest] = {}
    for request in requests:
        found.setdefault(RequestClass.of(request), request)
    return found


def rate_for(
    samples: Sequence[Sequence[PlannedRequest]],
    alone_s: Callable[[PlannedRequest], float],
    *,
    load: float,
    length_s: float,
) -> float:
    """Requests a second at which days of that length, on average, take `load` of it where they are drawn one by one.

    samples: the first requests of each day, as many of each, more than it will have. alone_s: what one takes; asked of
    the first ones of each day, as many as that takes, so that nothing is measured of what never comes.
    """
    taken_s: list[float] = []
    for requests in zip(*samples, strict=True):
        taken_s.append(sum(map(alone_s, requests)) / len(requests))
        if sum(taken_s) >= load * length_s:
            break
    return load / mean(taken_s)


def warm_up_requests(requests: Sequence[PlannedRequest], controlnets: Sequence[str]) -> list[PlannedRequest]:
    """What a side draws before its day: each ControlNet, an edit, and one with LoRAs. No prompt is one of the day's."""
    by_class = one_of_each(requests).values()
    controlled = next((request for request in by_class if request.controlnets), None)
    edit = next((request for request in by_class if request.kind == "edit"), None)
    styled = next((request for request in by_class if request.loras), None)
    nets = [replace(controlled, controlnets=(name,), steps=_LEAST_STEPS) for name in controlnets] if controlled else []
    wanted = [*nets, *(request for request in (edit, styled) if request is not None)]
    return [replace(request, prompt=f"warm up {number}") for number, request in enumerate(wanted)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}" if number else ""
