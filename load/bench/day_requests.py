"""The requests of a compressed day, and their classes.

Steps, bursts and the number of templates shrink with the day, the shares and the shapes do not.
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

# Requests of a long day that are looked at to know the classes, and how long they take.
_LOOKED_AT = 1000
_LEAST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """Requests that take equally long alone, with so many ControlNets and LoRAs."""

    kind: Kind
    steps: int
    controlnets: int
    loras: int

    @classmethod
    def of(cls, request: PlannedRequest) -> RequestClass:
        """Return the class of a request."""
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
    """How a mix is compressed."""

    mix: str
    """Its name or file."""
    minutes: float
    """Length of the day."""
    steps_share: float
    """Share of the mix's denoising steps that are made."""
    templates: int
    """Templates that are edited."""
    controlnets: Sequence[str]
    loras: Sequence[str]
    """Names, the most popular ones first."""

    def requests(self, rate_per_s: float, seed: int) -> list[PlannedRequest]:
        """Return the requests of a day at this mean rate. Raises ConfigError for a mix of which none can be made."""
        return [self._compressed(request) for request in plan(self.at(rate_per_s), seed)]

    def sample(self, seed: int) -> list[PlannedRequest]:
        """Return the first requests of a day, whatever its rate: more than it will have."""
        return self.requests(_LOOKED_AT / (60.0 * self.minutes), seed)

    def at(self, rate_per_s: float) -> Mix:
        """Return the compressed mix, except for its steps."""
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
                f"the mix {self.mix} has edits with ControlNets, which this bench's plain server does not draw"
            )
        return replace(request, steps=max(_LEAST_STEPS, round(self.steps_share * request.steps)))


def one_of_each(requests: Sequence[PlannedRequest]) -> dict[RequestClass, PlannedRequest]:
    """Return the first request of every class."""
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
    """Return requests a second at which days, on average, take `load` of their length if drawn one by one.

    Args:
        samples: The first requests of each day, equally many, more than it will have.
        alone_s: Returns the seconds of a request; called only for requests that the days will have.
    """
    taken_s: list[float] = []
    for requests in zip(*samples, strict=True):
        taken_s.append(sum(map(alone_s, requests)) / len(requests))
        if sum(taken_s) >= load * length_s:
            break
    return load / mean(taken_s)


def warm_up_requests(requests: Sequence[PlannedRequest], controlnets: Sequence[str]) -> list[PlannedRequest]:
    """Return requests to draw before a day: each ControlNet, an edit, and one with LoRAs; no prompt is the day's."""
    by_class = one_of_each(requests).values()
    controlled = next((request for request in by_class if request.controlnets), None)
    edit = next((request for request in by_class if request.kind == "edit"), None)
    styled = next((request for request in by_class if request.loras), None)
    nets = [replace(controlled, controlnets=(name,), steps=_LEAST_STEPS) for name in controlnets] if controlled else []
    wanted = [*nets, *(request for request in (edit, styled) if request is not None)]
    return [replace(request, prompt=f"warm up {number}") for number, request in enumerate(wanted)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}" if number else ""
