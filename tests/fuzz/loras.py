"""The fixed corpus of LoRAs in requests: of callers, of workers that join, and of the gateway to a worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bottega import kinds
from bottega.v1 import fleet_pb2, worker_pb2
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec, Lora, Techniques
from bottega.v1.worker_pb2 import AttemptDecisions
from tests.fuzz.case import (
    BAD_DIGESTS,
    BAD_NAMES,
    INF,
    INVALID,
    NAN,
    OK,
    UNAVAILABLE,
    Case,
    case_of,
    refused_load,
    shown,
)
from tests.fuzz.images import good_images
from tests.samples.hosted_loras import applied, at_hand
from tests.support.addon_messages import loras_at

_STEPS = (-(2**31), -1, 201, 2**31 - 1)
# Nobody listens there: what such an attempt lacks, it waits for until it is cancelled.


def lora_drawings(case: Any) -> Iterator[Case]:
    """Of callers, to a gateway without a LoRA store. case: makes one."""

    def bad(name: str, field: str, *loras: Lora, **spec: Any) -> Case:
        made: Case = case(f"LoRA {name}", INVALID, f"spec.loras{field}", loras=loras, **spec)
        return made

    yield case("eight LoRAs, and no store", UNAVAILABLE, loras=[Lora(name="ink")] * 8)
    whole = Lora(
        name="x" * 200,
        scale=-1e300,
        from_step=0,
        max_step=200,
        digest="a" * 64,
        measure_similarity=True,
        token="x" * 200,
        denoiser_only=True,
    )
    yield case("a LoRA with everything, and no store", UNAVAILABLE, loras=[whole], num_inference_steps=200)
    yield case("a LoRA at the last step, and no store", UNAVAILABLE, loras=[Lora(name="ink", from_step=29)])
    yield bad("after the last step", "[0].from_step", Lora(name="ink", from_step=30))
    yield bad("at the latest after the last step", "[0].max_step", Lora(name="ink", max_step=31))
    yield bad("measured from a later step", "[0].from_step", Lora(name="ink", from_step=1, measure_similarity=True))
    late = Lora(name="ink", max_step=30)
    off, on = Techniques(bounded_lora_loading=False), Techniques(bounded_lora_loading=True)
    yield case("a late LoRA with a seed, and no store", UNAVAILABLE, loras=[late], seed=1)
    yield case("a late LoRA, switched on, and no store", UNAVAILABLE, loras=[late], fidelity=1, techniques=on)
    yield bad("late and exact", "[0].max_step", late, fidelity=1)
    pinned = Lora(name="ink", from_step=1)
    yield bad("from the second step and exact", "[0].from_step", pinned, fidelity=1)
    yield bad("from the second step, exact and off", "[0].from_step", pinned, fidelity=1, techniques=off)
    yield case("a LoRA from the second step, exact and on", UNAVAILABLE, loras=[pinned], fidelity=1, techniques=on)
    yield case("a LoRA from the second step with a seed", UNAVAILABLE, loras=[pinned], seed=1)
    yield case("a LoRA from the second step, balanced", UNAVAILABLE, loras=[pinned], fidelity=2, seed=1)
    yield case("a LoRA from the first step and exact", UNAVAILABLE, loras=[Lora(name="ink", from_step=0)], fidelity=1)
    yield bad("late and switched off", "[0].max_step", late, techniques=off)
    yield case("nine LoRAs", INVALID, "spec.loras", loras=[Lora(name="ink")] * 9)
    for step in _STEPS:
        yield bad(f"at {step} at the latest", "[0].max_step", Lora(name="ink", max_step=step))
        yield bad(f"from {step}", "[0].from_step", Lora(name="ink", from_step=step))
    for text in BAD_DIGESTS:
        yield bad(f"of digest {shown(text)}", "[0].digest", Lora(name="ink", digest=text))
    yield bad("with a long token", "[0].token", Lora(name="ink", token="x" * 201))
    for name in BAD_NAMES:
        yield bad(f"called {shown(name)}", "[0].name", Lora(name=name))
    for scale in (NAN, INF, -INF):
        yield bad(f"scaled {scale}", "[0].scale", Lora(name="ink", scale=scale))
    yield bad("from two steps", "[1].from_step", Lora(name="ink", from_step=1), Lora(name="ink", from_step=2))
    yield bad("from one step and from any", "[1].from_step", Lora(name="ink", from_step=0), Lora(name="ink"))
    measured = Lora(name="ink", measure_similarity=True)
    nets = [ControlNet(name="edges", image=good_images()["png"])]
    yield bad("measured beside a ControlNet", "[0].measure_similarity", measured, controlnets=nets)


def lora_loads(case: Any) -> Iterator[Case]:
    """Of workers that say what LoRAs they have. case: makes one of them that joins."""
    many = at_hand(*(f"{number:064x}" for number in range(1025)))
    yield case("1024 LoRAs at hand", load=fleet_pb2.Load(hosted=many[:-1]))
    bad = {"1025": many, "one twice": many[:1] * 2, **{shown(text): at_hand(text) for text in BAD_DIGESTS}}
    for name, loras in bad.items():
        yield refused_load(case(f"LoRAs at hand: {name}", load=fleet_pb2.Load(hosted=loras)), "hosted")
    yield from _applied_loads(case)


def _applied_loads(case: Any) -> Iterator[Case]:
    """Of workers that say what is in their weights."""
    patched = applied("a" * 64, -1e300)
    for name, load in {
        "eight LoRAs in the weights": fleet_pb2.Load(hosted=[patched] * 8),
        "weights that swap at once": fleet_pb2.Load(switch_times=[_switch("loras", 0.0)]),
        "weights that never swap": fleet_pb2.Load(switch_times=[_switch("loras", 1e308)]),
    }.items():
        yield case(name, load=load)
    bad = {
        "nine": [patched] * 9,
        **{f"of digest {shown(text)}": [applied(text)] for text in BAD_DIGESTS},
        **{f"scaled {scale}": [applied("a" * 64, scale)] for scale in (NAN, INF, -INF)},
    }
    for name, loras in bad.items():
        whole = case(f"LoRAs in the weights: {name}", load=fleet_pb2.Load(hosted=loras))
        yield refused_load(whole, "hosted")
    for kind, seconds in (("loras", -0.001), ("loras", NAN), ("loras", INF), ("loras", -INF), ("no kind", 1.0)):
        whole = case(f"{kind} that swap in {seconds} s", load=fleet_pb2.Load(switch_times=[_switch(kind, seconds)]))
        yield refused_load(whole, "switch_times")


def _switch(kind: str, seconds: float) -> fleet_pb2.SwitchTime:
    return fleet_pb2.SwitchTime(kind=kind, seconds=seconds)


def lora_attempts(filled: dict[str, Any]) -> Iterator[Case]:
    """Of a gateway, to a worker. filled: fields of a spec that are filled in."""
    whole = _ordered()
    steps = filled["num_inference_steps"]
    numbers = itertools.count()

    def case(name: str, loras: list[Lora], *fields: str, **order: Any) -> Case:
        request = worker_pb2.RunAttemptRequest(
            attempt=worker_pb2.AttemptId(job_id=f"lora-{next(numbers)}", number=1),
            spec=GenerationSpec(prompt="a star", loras=loras, **filled),
            **order,
        )
        return case_of("RunAttempt", name, request, INVALID if fields else OK, *fields)

    yield case("LoRAs that a store has which is not there", [whole] * 8)
    yield case("LoRAs that went in at the last step", [whole], decisions=AttemptDecisions(by_kind=loras_at(steps - 1)))
    yield case("a LoRA from the last step", [_ordered(from_step=steps - 1)])
    yield case("a measured LoRA", [_ordered(measure_similarity=True)])
    yield case("a LoRA of the denoiser alone", [_ordered(denoiser_only=True)])
    yield case("an embedding", [_ordered(token="<" + "x" * 199)])
    yield case("an embedding of a long token", [_ordered(token="x" * 201)], "spec.loras[0].token")
    lacking = [f"spec.loras[0].{name}" for name in ("scale", "digest", "max_step")]
    yield case("a bare LoRA", [Lora(name="ink")], *lacking)
    yield case("nine LoRAs", [whole] * 9, "spec.loras")
    for step in (-1, steps, 2**31 - 1):
        late = case(f"LoRAs that went in at {step}", [whole], decisions=AttemptDecisions(by_kind=loras_at(step)))
        yield replace(late, refused_later=True)
    yield case("a LoRA from after the end", [_ordered(from_step=steps)], "spec.loras[0].from_step")
    for step, fields in ((steps, ()), (steps + 1, ("spec.loras[0].max_step",))):
        yield case(f"a LoRA at {step} at the latest", [_ordered(max_step=step)], *fields)
    measured = _ordered(from_step=1, measure_similarity=True)
    yield case("a LoRA that is measured from a later step", [measured], "spec.loras[0].from_step")
    noise = case("a decision that is noise", [whole], decisions=AttemptDecisions(by_kind={kinds.LORAS: b"\xff" * 9}))
    yield replace(noise, refused_later=True)
    for by_kind in (
        {"no kind": b""},
        {f"k{number}": b"" for number in range(17)},
        {kinds.LORAS: bytes((256 << 10) + 1)},
    ):
        decisions = AttemptDecisions(by_kind=by_kind)
        yield case(f"decisions of {shown(''.join(by_kind))}", [whole], "decisions.by_kind", decisions=decisions)


def _ordered(**facts: Any) -> Lora:
    return Lora(**{"name": "ink", "scale": 1.0, "digest": "a" * 64, "max_step": 0, **facts})
