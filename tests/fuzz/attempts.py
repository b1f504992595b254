"""The fixed corpus of what a gateway asks of a worker, and one worker of another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from bottega import rules
from bottega.v1 import worker_pb2
from bottega.v1.activations_pb2 import DropTemplateRequest, ListTemplatesRequest, ProfileBlocksRequest
from bottega.v1.generation_pb2 import GenerationSpec, Techniques
from tests.fuzz.case import (
    INF,
    INVALID,
    LEAST_INT32,
    MIB_TEXT,
    MOST_INT32,
    NAN,
    NOT_FOUND,
    OK,
    Case,
    asking,
    case_of,
    limits,
    shown,
)
from tests.fuzz.controls import control_attempts
from tests.fuzz.edits import edit_attempts
from tests.fuzz.images import bad_images, good_images, some_good_images, too_large_image
from tests.fuzz.loras import lora_attempts
from tests.fuzz.specs import FILLED, PIN, spec_ranges


def attempt_corpus() -> Iterator[Case]:
    """All of it, of attempts that are stopped at once."""
    numbers = itertools.count()

    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, whole: Any = None, **spec: Any) -> Case:
        # Each is an attempt of its own: one that was refused keeps its refusal for whoever orders it again.
        attempt = worker_pb2.AttemptId(job_id=f"fuzz-{next(numbers)}", number=1, generation=1)
        drawn = GenerationSpec(**{"prompt": "a star", **FILLED, **spec})
        request = worker_pb2.RunAttemptRequest(**{"attempt": attempt, "spec": drawn, **(whole or {})})
        return case_of("RunAttempt", name, request, code, *fields)

    def ordered(name: str, code: grpc.StatusCode = OK, /, *fields: str, **whole: Any) -> Case:
        return case(name, code, *fields, whole=whole)

    yield case("a whole order")
    yield from spec_ranges(case)
    # Only the engine knows that the embedded model has no T5, and these attempts are stopped before.
    yield from limits(case, "max_sequence_length", (1, 512), (), within="spec.")
    for name in FILLED:
        absent: dict[str, Any] = {name: None}
        yield case(f"without {name}", INVALID, f"spec.{name}", **absent)
    yield from _ordered_models(case)
    yield from _ordered_images(case)
    yield from edit_attempts(case)
    yield from _ordered_switches(case)
    yield from limits(ordered, "deadline_s", (1e308, INF), (-0.001, NAN, -INF))
    shares = [
        worker_pb2.TenantShare(tenant=name, weight=w) for name, w in (("shop", 3.0), ("x" * 128, 0.01), ("", 100.0))
    ]
    yield from limits(ordered, "share", shares)
    for weight in (0.0, 0.009, 100.1, -1.0, NAN, INF):
        share = worker_pb2.TenantShare(tenant="shop", weight=weight)
        yield ordered(f"share of {weight:g}", INVALID, "share.weight", share=share)
    share = worker_pb2.TenantShare(tenant="x" * 129, weight=1.0)
    yield ordered("share of a tenant of 129", INVALID, "share.tenant", share=share)
    yield from limits(ordered, "request_id", ("x" * 128,), ("x" * 129,))
    yield from control_attempts(case)
    yield from lora_attempts(FILLED)
    for size in (500, 20 << 20):
        yield case(
            f"a checkpoint of {size} bytes of noise", whole={"checkpoint": bad_images()["noise"] * (size // 500)}
        )
    nothing = ("attempt.job_id", "attempt.number", *(f"spec.{name}" for name in FILLED))
    yield case_of("RunAttempt", "nothing at all", worker_pb2.RunAttemptRequest(), INVALID, *nothing)
    for method in ("RunAttempt", "CancelAttempt", "PreviewAttempt"):
        for job_id, number, generation, field in (
            ("", 1, 0, "job_id"),
            ("x" * 129, 1, 0, "job_id"),
            ("x", 0, 0, "number"),
            ("x", -1, 0, "number"),
            ("x", 1, -1, "generation"),
        ):
            broken = worker_pb2.AttemptId(job_id=job_id, number=number, generation=generation)
            request = getattr(worker_pb2, f"{method}Request")(attempt=broken)
            if method == "RunAttempt":
                request.spec.CopyFrom(GenerationSpec(**FILLED))
            yield case_of(
                method, f"attempt {shown(job_id)} {number} {generation}", request, INVALID, f"attempt.{field}"
            )
    for method in ("CancelAttempt", "PreviewAttempt"):
        unknown = worker_pb2.AttemptId(job_id="x" * 128, number=2**31 - 1, generation=2**63 - 1)
        yield case_of(method, "an unknown attempt", getattr(worker_pb2, f"{method}Request")(attempt=unknown))
    yield case_of("ListAttempts", "the only one", worker_pb2.ListAttemptsRequest())
    yield case_of("WatchCheckpoints", "the only one", worker_pb2.WatchCheckpointsRequest())
    yield from _of_templates()


def _of_templates() -> Iterator[Case]:
    yield case_of("ListTemplates", "the only one", ListTemplatesRequest())
    dropped = asking("DropTemplate", DropTemplateRequest)
    template = "0123456789abcdef" * 2
    yield from limits(dropped, "id", ("", "01234567", template))
    yield from limits(dropped, "id", (), ("0123456", f"{template}0", "ABCDEFAB", "../../../x", "0" * (1 << 20)))
    for side in (0, 64):
        pictures = ProfileBlocksRequest(width=side, height=side)
        yield replace(case_of("ProfileBlocks", f"pictures of {side}", pictures), if_idle=True)
    profiled = asking("ProfileBlocks", ProfileBlocksRequest, width=64, height=64)
    for field in ("width", "height"):
        yield from limits(profiled, field, (), (-1, rules.MAX_SIDE + 1, MOST_INT32, LEAST_INT32))


def _ordered_models(case: Any) -> Iterator[Case]:
    yield case("this worker's model", model="miniature")
    for model in ("nobody", "", "\0", "x" * 200):
        yield case(f"model {shown(model)}", NOT_FOUND, model=model)
    yield from limits(case, "model", (), ("x" * 201, MIB_TEXT), within="spec.")


def _ordered_images(case: Any) -> Iterator[Case]:
    png = good_images()["png"]
    yield case("strength without an image", INVALID, "spec.strength", strength=0.5)
    yield case("an image without strength", INVALID, "spec.strength", image=png)
    for name, image in some_good_images().items():
        yield case(f"good image: {name}", image=image, strength=0.5)
    for name, image in {"empty": b"", "too large": too_large_image()}.items():
        yield case(f"bad image: {name}", INVALID, "spec.image", image=image, strength=0.5)


def _ordered_switches(case: Any) -> Iterator[Case]:
    yield case("previews", whole={"preview": True})
    yield case("a cache entry", techniques=Techniques(cache_entry=PIN))
    for field in Techniques.DESCRIPTOR.fields:
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            for value in (False, True):
                switched: dict[str, Any] = {field.name: value}
                words = {"fidelity": 3} if field.name == "step_caching" else {}
                yield case(f"{field.name} {value}", techniques=Techniques(**switched), **words)
