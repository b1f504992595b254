"""Requests, answers and runs of a compressed day, made up."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from bottega.client import Picture
from bottega.client.types.provenance import provenance_from
from bottega.v1.generation_pb2 import Provenance
from load.bench.day_figures import Comparison, DayRun, Figures, Scale
from load.bench.day_requests import RequestClass
from load.replay.requests import PlannedRequest
from load.replay.results import Answer, Outcome, concluded

NETS, LORAS = ("net0", "net1", "net2"), ("lora0", "lora1")
DRAW = PlannedRequest(
    at_s=0.0,
    kind="draw",
    prompt="a star",
    seed=3,
    steps=8,
    template=None,
    mask_ratio=None,
    controlnets=(),
    loras=(),
    session=0,
)
EDIT = replace(DRAW, kind="edit", template=1, mask_ratio=0.1)
LENGTH_S, DEADLINE_S = 240.0, 60.0
SCALE = Scale(alone_s={RequestClass.of(DRAW): 2.0, RequestClass.of(EDIT): 1.0}, deadline_s=DEADLINE_S)


def answered(request: PlannedRequest, latency_s: float) -> Answer[PlannedRequest]:
    """It was answered so late."""
    return Answer(request=request, outcome=Outcome.ANSWERED, reason="", latency_s=latency_s, delay_s=0.0)


def refused(request: PlannedRequest) -> Answer[PlannedRequest]:
    """It was refused."""
    return Answer(request=request, outcome=Outcome.REFUSED, reason="Overloaded", latency_s=0.01, delay_s=0.0)


def figures(*answers: Answer[PlannedRequest], processor_s: float = 60.0) -> Figures:
    """Of one run with these answers."""
    replayed = concluded(answers, deadline_s=DEADLINE_S, length_s=LENGTH_S)
    return Figures(runs=[DayRun(replayed=replayed, processor_s=processor_s)], scale=SCALE)


def at(hour: float, request: PlannedRequest) -> PlannedRequest:
    """The request, at that hour of the day."""
    return replace(request, at_s=hour / 24 * LENGTH_S)


def compared() -> Comparison:
    """Of twenty requests the plain server answers five in time, the suite all, and without masks ten."""
    requests = [at(number, EDIT) for number in range(20)]
    return Comparison(
        plain=figures(*(answered(each, 2.5 if number < 5 else 30.0) for number, each in enumerate(requests))),
        suite=figures(*(answered(each, 1.5) for each in requests)),
        without={
            "masked_blocks": figures(
                *(answered(each, 2.0 if number < 10 else 6.0) for number, each in enumerate(requests))
            )
        },
    )


def picture_of(provenance: Provenance) -> Picture:
    """A picture of which only the provenance is there."""
    return cast("Picture", type("Made", (), {"provenance": provenance_from(provenance)})())
