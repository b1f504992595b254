"""The fixed corpus of Join: what a service may say of itself and of its load."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

from bottega import kinds
from bottega.v1 import fleet_pb2, image_pb2, worker_pb2
from bottega.v1.generation_pb2 import SAMPLER_EULER, SAMPLER_UNSPECIFIED
from bottega.v1.hosted_pb2 import LeftOut
from bottega.v1.image_pb2 import SamplerChoice
from tests.fuzz.case import INF, INVALID, LEAST_INT32, MIB_TEXT, MOST_INT32, NAN, OK, Case, limits, shown
from tests.fuzz.controls import control_loads
from tests.fuzz.loras import lora_loads

Sides = tuple[Sequence[Any], Sequence[Any]]
"""Values of a field that are taken, and that are not."""

_EULER = SamplerChoice(sampler=SAMPLER_EULER, is_default=True)
_KARRAS = SamplerChoice(sampler=SAMPLER_EULER, use_karras_sigmas=True)
# Values of a model's field that a request could be drawn with, and that it could not.
_SIDES = ((0, 16_384), (-1, 16_385))
_TEXTS = (("", "x" * 128), ("x" * 129, MIB_TEXT))
_MODELS: Mapping[str, Sides] = {
    "name": (("x", "x" * 200), ("", "x" * 201, MIB_TEXT)),
    **dict.fromkeys(("model_hash", "dtype", "base"), _TEXTS),
    **dict.fromkeys(("default_width", "default_height", "max_side", "size_multiple", "vae_scale_factor"), _SIDES),
    "default_steps": ((0, 200), (-1, 201)),
    "default_guidance_scale": ((0.0, 50.0), (-0.1, 50.1, NAN, INF)),
    "default_edit_guidance_scale": ((0.0, 50.0), (-0.1, 50.1, NAN, INF)),
    **dict.fromkeys(("default_strength", "default_edit_strength"), ((0.01, 1.0), (0.0, 1.01, NAN))),
    "default_edit_controlnet_scale": ((0.0, 0.5, 2.0), (NAN, INF)),
    "default_sampler": ((0, 19), (20, 99)),
    "max_pixels": ((0, 2**63 - 1), (-1,)),
    "max_clip_skip": ((0, 100), (-1, 101)),
    "max_sequence_length": ((0, 512), (-1, 513)),
    "sampler_choices": (
        (
            [],
            [_EULER],
            [_EULER, _KARRAS],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, refused_because="x" * 512)],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, refused_steps={1: "x", 200: "x" * 512})],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, evaluations_per_step=4, extra_evaluations=-16)],
        ),
        (
            [_KARRAS],
            [_EULER, _EULER],
            [_EULER, SamplerChoice(sampler=SAMPLER_EULER, use_karras_sigmas=True, is_default=True)],
            [SamplerChoice(sampler=SAMPLER_UNSPECIFIED, is_default=True)],
            [SamplerChoice(sampler=99, is_default=True)],  # type: ignore[arg-type]
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, refused_because="x" * 513)],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, evaluations_per_step=-1)],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, evaluations_per_step=5)],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, extra_evaluations=17)],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, refused_steps={0: "x"})],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, refused_steps={201: "x"})],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, refused_steps={1: ""})],
            [SamplerChoice(sampler=SAMPLER_EULER, is_default=True, refused_steps={1: "x" * 513})],
        ),
    ),
    "edits_refused_because": (("", "x" * 512), ("x" * 513,)),
    **dict.fromkeys(
        (
            "edits_only",
            "embeds_guidance",
            "guidance_from_zero",
            "one_text_encoder",
            "plain_prompts_only",
            "strength_keeps_steps",
            "takes_true_cfg",
        ),
        ((False, True), ()),
    ),
    "workers": ((-1, MOST_INT32), ()),
}


def joining_corpus() -> Iterator[Case]:
    """All of it; every service leaves again."""

    numbers = itertools.count()

    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, load: Any = None, **changes: Any) -> Case:
        number = next(numbers)  # one of the name of another that has just left would have to wait
        facts = {"kind": kinds.LORAS, "name": f"fuzz {number}", "address": "127.0.0.1:1"}
        whole: dict[str, Any] = {**facts, "instance": f"instance {number:020}", **changes}
        first = fleet_pb2.JoinRequest(registration=fleet_pb2.Registration(**whole))
        second = fleet_pb2.JoinRequest(load=load or fleet_pb2.Load())
        named = frozenset(f"registration.{field}" for field in fields)
        raw = (first.SerializeToString(), second.SerializeToString())
        return Case(method="Join", name=name, raw=raw, code=code, fields=named)

    yield case("a store of LoRAs")
    yield case("sixteen kinds of services that it uses", OK, uses=[f"k{n}" for n in range(16)])
    for name, uses in {"seventeen": [f"k{n}" for n in range(17)], "one twice": ["a"] * 2, "none": ["no kind"]}.items():
        yield case(f"kinds that it uses: {name}", INVALID, "uses", uses=uses)
    addresses = ("x", ":1", "x:", "x:65536", "x:-1", "unix:/run/x", "dns:///x:1", "a b:1", "\0:1", "x" * 257 + ":1")
    metrics = ("", "127.0.0.1:9001", "[::]:9001", "x" * 254 + ":1")
    bounds: dict[str, Sides] = {
        "kind": ((), ("", "Worker", "a b", "-", "x" * 33, "x" * 10_000)),
        "name": ((), ("", "x" * 129, MIB_TEXT)),
        "address": ((), ("", *addresses)),
        "metrics_address": (metrics, addresses),
        **dict.fromkeys(("version", "device"), (("x" * 128,), ("x" * 129,))),
        "instance": (("x" * 16, "x" * 64), ("", "x" * 15, "x" * 65, MIB_TEXT)),
    }
    for field, (good, bad) in bounds.items():
        yield from limits(case, field, good, bad)
    yield from _models(case)
    yield case(
        "everything at once",
        INVALID,
        "kind",
        "name",
        "address",
        "instance",
        "models",
        kind="",
        name="",
        address="",
        instance="",
        models=[image_pb2.Model()] * 2,
    )
    yield from _loads(case)
    yield from _planned(case)
    yield from control_loads(case)
    yield from lora_loads(case)
    yield Case(method="Join", name="nothing", raw=(), code=INVALID, fields=frozenset({"registration"}))
    no_registration = fleet_pb2.JoinRequest(load=fleet_pb2.Load()).SerializeToString()
    yield Case(
        method="Join", name="load first", raw=(no_registration,), code=INVALID, fields=frozenset({"registration"})
    )


def _models(case: Any) -> Iterator[Case]:
    for field, (good, bad) in _MODELS.items():
        for value in (*good, *bad):
            facts: dict[str, Any] = {"name": "x", field: value}
            refused = (INVALID, "models") if value in bad else ()
            yield case(f"model's {field} {shown(value)}", *refused, models=[image_pb2.Model(**facts)])
    many = [image_pb2.Model(name=f"m{number}") for number in range(257)]
    yield case("256 models", models=many[:256])
    yield case("257 models", INVALID, "models", models=many)
    yield case("one model twice", INVALID, "models", models=[many[0], many[0]])


def _loads(case: Any) -> Iterator[Case]:
    """Yield reports of services. case: makes one of a service that joins."""

    def loaded(name: str, code: grpc.StatusCode = OK, /, *fields: str, **load: Any) -> Case:
        made: Case = case(f"load: {name}", load=fleet_pb2.Load(**load))
        return dataclasses.replace(made, code=code, fields=frozenset(fields))

    step = fleet_pb2.StepTime(latent_height=-1, latent_width=MOST_INT32, rows=0, seconds=NAN)
    running = fleet_pb2.RunningAttempt(steps_left=LEAST_INT32)
    yield loaded("nonsense that is not used", running=[running] * 9, step_times=[step] * 9)
    wrong: dict[str, Any] = {"running": [running] * 4097, "step_times": [step] * 4097}
    wrong |= {"fixed_s": INF, "max_rows": -1, "memory_bytes": -1}
    yield loaded("all of it wrong", INVALID, *(f"load.{name}" for name in wrong), **wrong)
    long = ([_running("x" * 128)], [_running("x" * 129)])
    bounds: dict[str, Sides] = {
        "running": (([running] * 4096, long[0]), ([running] * 4097, long[1])),
        "step_times": (([step] * 4096,), ([step] * 4097,)),
        "fixed_s": ((), (-0.001, NAN, INF, -INF)),
        "start_s": ((86_400.0,), (-0.001, 86_400.001, NAN, INF, -INF)),
        **dict.fromkeys(("max_rows", "queued_rows"), ((), (-1, LEAST_INT32))),
        **dict.fromkeys(("memory_bytes", "budget_bytes"), ((), (-1, -(2**63)))),
        "starting": _starts(),
        "pools": _pools(),
        "mask_tokens": _mask_tokens(),
        "masked_times": _masked_times(),
        "accelerations": _accelerations(),
        "left_out": _left_out(),
        "activity": _activities(),
    }
    for field, (good, bad) in bounds.items():
        yield from limits(loaded, field, good, bad, within="load.")


def _starts() -> Sides:
    wrong: list[dict[str, Any]] = [{"stage": ""}, {"stage": "x" * 65}]
    wrong += [{"stage": "x", field: number} for field in ("done_bytes", "total_bytes") for number in (-1, -(2**63))]
    most = fleet_pb2.StartProgress(stage="x" * 64, done_bytes=2**63 - 1, total_bytes=2**63 - 1)
    return [most], [fleet_pb2.StartProgress(**facts) for facts in wrong]


def _pools() -> Sides:
    """Return what scalers report. Other services are not asked what they report as pools."""
    most: dict[str, Any] = {"model": "x" * 200, "minimum": 256, "maximum": 256, "starting_s": [0.0] * 254}
    most |= {"ready": 1, "failed": 1}
    several = [fleet_pb2.Pool(kind="worker", model=str(number), maximum=1) for number in range(65)]
    good = [[fleet_pb2.Pool(kind=kind, **most) for kind in (kinds.WORKER, kinds.CONTROLNET)], several[:64]]
    wrong: list[dict[str, Any]] = [
        *({"kind": kind} for kind in ("", "cache")),
        *({"model": model} for model in ("", "x" * 201)),
        *({"minimum": number} for number in (-1, 5)),
        *({"maximum": number} for number in (-1, 257)),
        *({"ready": number} for number in (-1, 5)),
        *({"failed": number} for number in (-1, MOST_INT32)),
        *({"starting_s": seconds} for seconds in ([-1.0], [NAN], [INF], [0.0] * 5)),
    ]
    whole: dict[str, Any] = {"kind": "worker", "model": "x", "maximum": 4}
    return good, [several, several[:1] * 2, *([fleet_pb2.Pool(**{**whole, **facts})] for facts in wrong)]


def _mask_tokens() -> Sides:
    """Return what a worker says of masked rows."""
    facts = [
        {field: number} for field in ("token_elements", "margin_tokens") for number in (-1, 65, MOST_INT32, LEAST_INT32)
    ]
    most = fleet_pb2.MaskTokens(token_elements=64, margin_tokens=64)
    return [most], [fleet_pb2.MaskTokens(**each) for each in facts]


def _masked_times() -> Sides:
    """Return times of masked rows, of which nonsense is not used."""
    odd = fleet_pb2.PlannedTime(rows=NAN, seconds=-INF)
    sides: dict[str, Any] = {"latent_height": -1, "latent_width": MOST_INT32}
    most, more = (fleet_pb2.MaskedTimes(**sides, fixed_share=NAN, planned=[odd] * planned) for planned in (32, 33))
    few = fleet_pb2.MaskedTimes(**sides, fixed_share=NAN, planned=[odd])
    return [[most] * 32], [[few] * 33, [more]]


def _accelerations() -> Sides:
    """Return what a worker's self-check has found."""
    good: dict[str, Any] = {"name": "x" * 64, "kept": True, "reason": "r" * 512}
    measured = ("speedup", "difference", "tolerance")
    good |= dict.fromkeys(measured, 1e308)
    found = [fleet_pb2.Acceleration(**{**good, "name": f"kernels.a-b_{number}"}) for number in range(64)]
    wrong: list[dict[str, Any]] = [{"name": text} for text in ("", "x" * 65, "Kernels", "a b", "a\n")]
    wrong += [
        {field: number} for field in ("speedup", "difference", "tolerance") for number in (-0.001, NAN, INF, -INF)
    ]
    wrong.append({"reason": "r" * 513})
    bad = [[fleet_pb2.Acceleration(**{**good, **facts})] for facts in wrong]
    many = [fleet_pb2.Acceleration(name=f"a{number}") for number in range(65)]
    return [found, [fleet_pb2.Acceleration(**good)]], [*bad, many, [fleet_pb2.Acceleration(name="a")] * 2]


def _left_out() -> Sides:
    """Return what a service does not host."""
    good: dict[str, Any] = {"kind": "loras", "name": "n" * 200, "reason": "r" * 512}
    wrong = [{"kind": text} for text in ("", "LoRAs", "a b")]
    wrong += [{"name": ""}, {"name": "n" * 201}, {"reason": ""}, {"reason": "r" * 513}]
    return [[LeftOut(**good)] * 64], [[LeftOut(**good)] * 65, *([LeftOut(**{**good, **facts})] for facts in wrong)]


def _activities() -> Sides:
    """Return what a service says that it has counted."""
    names = [field.name for field in fleet_pb2.Activity.DESCRIPTOR.fields if field.name != "waited_s"]
    most: dict[str, Any] = dict.fromkeys(names, 2**63 - 1)
    wrong: list[dict[str, Any]] = [{name: number} for name in names for number in (-1, -(2**63))]
    wrong += [{"waited_s": number} for number in (-0.001, NAN, INF, -INF)]
    return [fleet_pb2.Activity(**most, waited_s=1e308)], [fleet_pb2.Activity(**facts) for facts in wrong]


def _planned(case: Any) -> Iterator[Case]:
    """Of workers of a model of their own; what is ordered from one is planned with what it has said."""
    step = {"latent_height": 16, "latent_width": 16, "rows": 2, "seconds": 0.02}
    planned = {"rows": 5e-324, "seconds": 1e308}
    loads: dict[str, dict[str, Any]] = {
        "every number at its limit": {"fixed_s": 1e308, "max_rows": MOST_INT32, "memory_bytes": 2**63 - 1},
        "ControlNets' numbers at their limits": {"queued_rows": MOST_INT32, "budget_bytes": 2**63 - 1},
        "no rows": {"max_rows": 0},
        "draining": {"draining": True},
        "much to do": {"running": [_running(f"foreign {number}") for number in range(4096)], "step_times": [step]},
        "endless turns": {"step_times": [{**step, "seconds": 1e308}, {**step, "rows": MOST_INT32, "seconds": 1e308}]},
        "turns of no time": {"step_times": [{**step, "seconds": 5e-324}], "running": [_running("foreign")]},
        "old turns": {
            "step_times": [{**step, "rows": rows, "outdated": True} for rows in (LEAST_INT32, 0, 1, MOST_INT32)]
        },
        "masked turns of no time": {
            "mask_tokens": {"token_elements": 2, "margin_tokens": 1},
            "masked_times": [{"latent_height": 16, "latent_width": 16, "fixed_share": 0.5, "planned": [planned]}],
        },
        "turns of no picture": {"step_times": [{**step, "latent_height": -1, "latent_width": MOST_INT32}]},
    }
    model = image_pb2.Model(name="other", default_width=64, default_height=64, default_steps=200)
    for name, facts in loads.items():
        load = fleet_pb2.Load(**facts)
        yield case(f"a worker: {name}", kind=kinds.WORKER, models=[model], load=load)


def _running(job_id: str) -> fleet_pb2.RunningAttempt:
    attempt = worker_pb2.AttemptId(job_id=job_id, number=MOST_INT32, generation=-(2**63))
    return fleet_pb2.RunningAttempt(attempt=attempt, steps_left=MOST_INT32, computed_share=NAN)
