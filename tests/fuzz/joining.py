"""The fixed corpus of Join: what a service may say of itself and of its load.

Knows the contract's bounds; sends nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import grpc

from bottega.v1 import fleet_pb2, image_pb2
from tests.fuzz.case import INF, INVALID, NAN, OK, Case, shown
from tests.fuzz.controls import control_loads
from tests.fuzz.loras import lora_loads

# Of a model, none of which a request could be drawn with.
_MODEL_FACTS = {
    **dict.fromkeys(("default_width", "default_height", "size_multiple", "vae_scale_factor"), (-1, 16_385)),
    "default_steps": (-1, 201),
    "default_guidance_scale": (-0.1, 50.1, NAN, INF),
    "default_sampler": (99,),
    "max_pixels": (-1,),
}


def joining_corpus() -> Iterator[Case]:
    """All of it; every service leaves again."""

    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, load: Any = None, **changes: Any) -> Case:
        whole = {"kind": fleet_pb2.SERVICE_KIND_LORAS, "name": "fuzz", "address": "127.0.0.1:1", **changes}
        first = fleet_pb2.JoinRequest(registration=fleet_pb2.Registration(**whole))
        second = fleet_pb2.JoinRequest(load=load or fleet_pb2.Load())
        named = frozenset(f"registration.{field}" for field in fields)
        raw = (first.SerializeToString(), second.SerializeToString())
        return Case(method="Join", name=name, raw=raw, code=code, fields=named)

    yield case("a store of LoRAs")
    for kind in (0, 99, -1):
        yield case(f"kind {kind}", INVALID, "kind", kind=kind)
    for name in ("", "x" * 129, "x" * (1 << 20)):
        yield case(f"name {shown(name)}", INVALID, "name", name=name)
    for address in (
        "",
        "x",
        ":1",
        "x:",
        "x:65536",
        "x:-1",
        "unix:/run/x",
        "dns:///x:1",
        "a b:1",
        "\0:1",
        "x" * 257 + ":1",
    ):
        yield case(f"address {shown(address)}", INVALID, "address", address=address)
    for field in ("version", "device"):
        for length, code in ((128, OK), (129, INVALID)):
            facts: dict[str, Any] = {field: "x" * length}
            yield case(f"{field} of {length}", code, *([field] if code is INVALID else ()), **facts)
    model = image_pb2.Model(name="x" * 200)
    yield case("a model", models=[model])
    for name in ("", "x" * 201, "x" * (1 << 20)):
        yield case(f"model {shown(name)}", INVALID, "models", models=[image_pb2.Model(name=name)])
    yield case("model_hash of 129", INVALID, "models", models=[image_pb2.Model(name="x", model_hash="x" * 129)])
    for field, values in _MODEL_FACTS.items():
        for value in values:
            odd = image_pb2.Model(name="x")
            setattr(odd, field, value)
            yield case(f"model's {field} {value}", INVALID, "models", models=[odd])
    for length, code in ((128, OK), (129, INVALID)):
        based = [image_pb2.Model(name="x", base="x" * length)]
        yield case(f"model's base of {length}", code, *(["models"] if code is INVALID else ()), models=based)
    yield case("one model twice", INVALID, "models", models=[model, model])
    yield case("257 models", INVALID, "models", models=[image_pb2.Model(name=f"m{n}") for n in range(257)])
    yield case(
        "everything at once",
        INVALID,
        "kind",
        "name",
        "address",
        "models",
        kind=0,
        name="",
        address="",
        models=[model] * 2,
    )
    step = fleet_pb2.StepTime(latent_height=-1, latent_width=2**31 - 1, rows=0, seconds=NAN)
    running = fleet_pb2.RunningAttempt(steps_left=-(2**31))
    yield case("a load with nonsense in it", load=fleet_pb2.Load(running=[running] * 9, step_times=[step] * 9))
    load = fleet_pb2.Load(running=[running] * 4097, step_times=[step] * 4097, fixed_s=INF, max_rows=-1, memory_bytes=-1)
    fields = frozenset({f"load.{name}" for name in ("running", "step_times", "fixed_s", "max_rows", "memory_bytes")})
    yield dataclasses.replace(case("a load of nonsense", load=load), code=INVALID, fields=fields)
    yield from control_loads(case)
    yield from lora_loads(case)
    yield Case(method="Join", name="nothing", raw=(), code=INVALID, fields=frozenset({"registration"}))
    no_registration = fleet_pb2.JoinRequest(load=fleet_pb2.Load()).SerializeToString()
    yield Case(
        method="Join", name="load first", raw=(no_registration,), code=INVALID, fields=frozenset({"registration"})
    )
