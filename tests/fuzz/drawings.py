"""The fixed corpus of Generate and SubmitJob: what callers may ask to be drawn, and what not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Techniques
from tests.fuzz.case import (
    INF,
    INVALID,
    MIB_TEXT,
    MOST_INT32,
    NAN,
    NOT_FOUND,
    OK,
    UNAVAILABLE,
    Case,
    case_of,
    limits,
    shown,
)
from tests.fuzz.controls import control_drawings
from tests.fuzz.edits import edit_drawings
from tests.fuzz.images import bad_images, good_images, largest_image, too_large_image
from tests.fuzz.loras import lora_drawings
from tests.fuzz.specs import PIN, spec_ranges

_BAD_REQUEST_IDS = ("x" * 129, "a b", "ü", "a\n", "\0", "../etc", MIB_TEXT)


def drawing_corpus() -> Iterator[Case]:
    """All of it, the same of both methods."""
    for method, request in (("Generate", image_pb2.GenerateRequest), ("SubmitJob", image_pb2.SubmitJobRequest)):
        yield from _drawings(method, request)


def _drawings(method: str, request: Any) -> Iterator[Case]:

    def case(
        name: str,
        code: grpc.StatusCode = OK,
        /,
        *fields: str,
        request_id: str = "",
        deadline_s: float | None = None,
        priority: Any = 0,
        **spec: Any,
    ) -> Case:
        full = GenerationSpec(**{"prompt": "a red star", **spec})
        whole = request(request_id=request_id, spec=full, deadline_s=deadline_s, priority=priority)
        return case_of(method, name, whole, code, *fields)

    yield case("nothing but a prompt")
    yield case_of(method, "nothing at all", request())
    if method == "Generate":
        previewed = image_pb2.GenerateRequest(spec=GenerationSpec(prompt="a star"), preview=True)
        yield case_of(method, "previews", previewed)
    yield from spec_ranges(case)
    # The embedded model has no T5.
    yield from limits(case, "max_sequence_length", (), (1, 512), within="spec.")
    yield from limits(case, "request_id", ("", f"x-{method}", f"A-Z_0.9:x-{method}"), _BAD_REQUEST_IDS)
    yield from limits(case, "deadline_s", (60.0, 1e308), (0.0, -1.0, NAN, INF, -INF))
    yield from limits(case, "priority", image_pb2.Priority.values(), (-1, 4, MOST_INT32))
    yield case("width 65", INVALID, "spec.width", width=65)
    yield case("more pixels than the model takes", INVALID, "spec.width", width=16_384, height=16_384)
    for model in ("nobody", "", "\0", "../../etc/passwd", "x" * 200):
        yield case(f"model {shown(model)}", NOT_FOUND, model=model)
    yield case("model of 201", INVALID, "spec.model", model="x" * 201)
    yield from _pictures(case)
    yield from edit_drawings(case)
    yield from lora_drawings(case)
    yield from control_drawings(case)
    yield from _techniques(case)
    wrong = {
        "width": -1,
        "height": 0,
        "num_images": 99,
        "guidance_scale": NAN,
        "sampler": 99,
        "quality": 0,
        "seed": 2**60,
    }
    fields = (
        *(f"spec.{name}" for name in wrong),
        "request_id",
        "deadline_s",
        "spec.prompt",
        "spec.image",
        "spec.strength",
        "spec.model",
    )
    texts: dict[str, Any] = {"prompt": "x" * 20_000, "image": b"", "strength": INF, "model": "x" * 300}
    yield case("everything at once", INVALID, *fields, request_id=" ", deadline_s=NAN, **wrong, **texts)


def _pictures(case: Any) -> Iterator[Case]:
    png = good_images()["png"]
    for name, image in {**good_images(), "the largest": largest_image()}.items():
        yield case(f"good image: {name}", image=image)
    for name, image in {**bad_images(), "too large": too_large_image()}.items():
        yield case(f"bad image: {name}", INVALID, "spec.image", image=image)
    bad_strengths = (0.0, -0.1, 1.001, NAN, INF, -INF, 0.001)
    yield from limits(case, "strength", (0.05, 1.0), bad_strengths, within="spec.", image=png)
    yield case("strength without an image", INVALID, "spec.strength", strength=0.5)


def _techniques(case: Any) -> Iterator[Case]:
    yield from _pins(case)
    for field in Techniques.DESCRIPTOR.fields:
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            for value in (False, True):
                switched: dict[str, Any] = {field.name: value}
                words = {"fidelity": 3} if field.name == "step_caching" else {}
                yield case(f"{field.name} {value}", techniques=Techniques(**switched), **words)
    on, refused = Techniques(step_caching=True), "spec.techniques.step_caching"
    for fidelity in (0, 1, 2):
        yield case(f"step_caching and fidelity {fidelity}", INVALID, refused, techniques=on, fidelity=fidelity)


def _pins(case: Any) -> Iterator[Case]:
    pinned = Techniques(cache_entry=PIN)
    for words in ({}, {"seed": 1}, {"fidelity": 2}, {"fidelity": 3, "num_images": 1}):
        yield case(f"a cache entry with {words}, and no cache", UNAVAILABLE, techniques=pinned, **words)
    both = Techniques(cache_entry=PIN, approximate_cache=True)
    yield case("a cache entry, switched on, and no cache", UNAVAILABLE, techniques=both)
    against: dict[str, Any] = {"num_images": 2, "prompt": "a star", "prompt_2": "", "fidelity": 1}
    against |= {"image": good_images()["png"]}
    against["keep_for_editing"] = True
    for name, value in against.items():
        yield case(f"a cache entry and {name}", INVALID, f"spec.{name}", techniques=pinned, **{name: value})
    for steps in (29, 31, 1, 200):
        field = "spec.techniques.cache_entry"
        yield case(
            f"a cache entry after 15 of {steps} steps", INVALID, field, techniques=pinned, num_inference_steps=steps
        )
    off = Techniques(cache_entry=PIN, approximate_cache=False)
    fields = ("spec.techniques.approximate_cache", "spec.techniques.cache_entry", *(f"spec.{name}" for name in against))
    all_at_once = {"num_inference_steps": 100, **against}
    yield case("a cache entry and all that is against it", INVALID, *fields, techniques=off, **all_at_once)
    on = Techniques(approximate_cache=True)
    yield case("kept and approximate_cache", INVALID, "spec.keep_for_editing", techniques=on, keep_for_editing=True)
    yield case("exact and approximate_cache", INVALID, "spec.techniques.approximate_cache", techniques=on, fidelity=1)
