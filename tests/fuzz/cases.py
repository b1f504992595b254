"""The fixed corpus: every field of every request at its limits and one past, each with the answer that it must get.

Knows the contract's bounds; sends nothing.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from bottega.v1 import fleet_pb2, image_pb2, worker_pb2
from bottega.v1.controlnet_pb2 import HOSTED_STATE_LOADED, HostedControlNet, ResidualProfile
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec, Lora, Techniques
from tests.fuzz.case import INF, INVALID, NAN, NOT_FOUND, OK, UNAVAILABLE, UNSERVED, Case, case_of, shown
from tests.fuzz.controlnets import controlnet_corpus
from tests.fuzz.hosting import LONGEST_NAME
from tests.fuzz.images import bad_images, good_images, largest_image, png_of_size, too_large_image
from tests.fuzz.lora_store import lora_store_corpus
from tests.fuzz.loras import lora_attempts, lora_drawings, lora_loads

# Fields that the gateway fills in for the worker.
FILLED: dict[str, Any] = {
    "num_inference_steps": 30,
    "guidance_scale": 4.0,
    "width": 64,
    "height": 64,
    "seed": 1,
    "num_images": 1,
}
# One past what a message may have.
TOO_LARGE_BYTES = (24 << 20) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Values of one field that are taken, and that are not."""

    field: str
    good: tuple[Any, ...]
    bad: tuple[Any, ...]


_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
_TAKEN_TEXTS = (
    "",
    "x" * 16_384,
    "é" * 8192,
    "\0",
    "a\u0301" * 99,
    "\u202e\u05d0\u0627",
    "\U0001f469\u200d\U0001f467",
    "\U0010ffff",
)
# Of a spec, whoever sends it.
_RANGES = (
    _Bounds(field="num_inference_steps", good=(1, 200), bad=(0, -1, 201, 2**31 - 1, -(2**31))),
    _Bounds(field="guidance_scale", good=(0.0, 1.0, 50.0), bad=(-0.001, 50.001, NAN, INF, -INF)),
    _Bounds(field="guidance_rescale", good=(0.0, 1.0), bad=(-0.001, 1.001, NAN, INF, -INF)),
    _Bounds(field="width", good=(8, 128), bad=(0, -8, 16_385, 2**31 - 1)),
    _Bounds(field="height", good=(8, 128), bad=(0, -8, 16_385, 2**31 - 1)),
    _Bounds(field="seed", good=(0, 2**53 - 8), bad=(2**53 - 7, 2**64 - 1)),
    _Bounds(field="num_images", good=(1, 8), bad=(0, -1, 9, 2**31 - 1)),
    _Bounds(field="quality", good=(1, 100), bad=(0, -1, 101)),
    _Bounds(field="sampler", good=(0, 1, 2, 3, 4), bad=(5, 99, -1)),
    _Bounds(field="fidelity", good=(0, 1, 2, 3), bad=(4, -1)),
    _Bounds(field="format", good=(0, 1, 2, 3), bad=(4, -1)),
    *(_Bounds(field=name, good=_TAKEN_TEXTS, bad=("x" * 16_385, "é" * 8193, "x" * (1 << 20))) for name in _TEXTS),
)
_REQUEST_IDS = _Bounds(
    field="request_id", good=("", "x", "A-Z_0.9:x"), bad=("x" * 129, "a b", "ü", "a\n", "\0", "../etc", "x" * (1 << 20))
)
_JOB_IDS = ("", "x", "\0", "../../etc/passwd", "x" * 129, "x" * (1 << 20), "\U0001f469\u200d\U0001f467")
# Of a model, none of which a request could be drawn with.
_MODEL_FACTS = {
    **dict.fromkeys(("default_width", "default_height", "size_multiple", "vae_scale_factor"), (-1, 16_385)),
    "default_steps": (-1, 201),
    "default_guidance_scale": (-0.1, 50.1, NAN, INF),
    "default_sampler": (99,),
    "max_pixels": (-1,),
}


def corpus(job_id: str, digest: str, lora_digest: str) -> Iterator[Case]:
    """All cases, those of the job first.

    job_id: of a job that has completed, with one picture. digest: of the ControlNet that the ControlNet server hosts.
    lora_digest: of the LoRA store's "ink".
    """
    for method in ("GetJob", "WatchJob", "CancelJob", "GetImage"):
        request = getattr(image_pb2, f"{method}Request")
        yield case_of(method, "a job that is there", request(job_id=job_id))
        for unknown in _JOB_IDS:
            yield case_of(method, f"no job is {shown(unknown)}", request(job_id=unknown), NOT_FOUND)
    for index in (-1, 1, 2**31 - 1, -(2**31)):
        yield case_of("GetImage", f"image {index}", image_pb2.GetImageRequest(job_id=job_id, index=index), NOT_FOUND)
    for method, request in (("Generate", image_pb2.GenerateRequest), ("SubmitJob", image_pb2.SubmitJobRequest)):
        yield from _drawing(method, request)
    yield from _lists()
    yield from _fleet()
    yield from _attempts()
    yield from controlnet_corpus(digest)
    yield from lora_store_corpus(lora_digest)
    yield from _bytes()


def _drawing(method: str, request: Any) -> Iterator[Case]:
    def case(
        name: str,
        code: grpc.StatusCode = OK,
        /,
        *fields: str,
        request_id: str = "",
        deadline_s: float | None = None,
        **spec: Any,
    ) -> Case:
        full = GenerationSpec(**{"prompt": "a star", **spec})
        whole = request(request_id=request_id, spec=full, deadline_s=deadline_s)
        return case_of(method, name, whole, code, *fields)

    yield case("nothing but a prompt")
    yield case_of(method, "nothing at all", request())
    yield from _ranges(case)
    for request_id in _REQUEST_IDS.good:
        yield case(f"request_id {shown(request_id)}", request_id=f"{request_id}-{method}" if request_id else "")
    for request_id in _REQUEST_IDS.bad:
        yield case(f"request_id {shown(request_id)}", INVALID, "request_id", request_id=request_id)
    for deadline_s in (60.0, 1e308):
        yield case(f"deadline_s {deadline_s:g}", deadline_s=deadline_s)
    for deadline_s in (0.0, -1.0, NAN, INF, -INF):
        yield case(f"deadline_s {deadline_s:g}", INVALID, "deadline_s", deadline_s=deadline_s)
    yield case("width 65", INVALID, "spec.width", width=65)
    yield case("more pixels than the model takes", INVALID, "spec.width", width=16_384, height=16_384)
    for model in ("nobody", "", "\0", "../../etc/passwd", "x" * 200):
        yield case(f"model {shown(model)}", NOT_FOUND, model=model)
    yield case("model of 201", INVALID, "spec.model", model="x" * 201)
    yield from _pictures(case)
    yield from _adapters(case)
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


def _ranges(case: Any) -> Iterator[Case]:
    for bounds in _RANGES:
        for good in bounds.good:
            yield case(f"{bounds.field} {shown(good)}", **{bounds.field: good})
        for bad in bounds.bad:
            yield case(f"{bounds.field} {shown(bad)}", INVALID, f"spec.{bounds.field}", **{bounds.field: bad})


def _pictures(case: Any) -> Iterator[Case]:
    png = good_images()["png"]
    for name, image in {**good_images(), "the largest": largest_image()}.items():
        yield case(f"good image: {name}", image=image)
    for name, image in {**bad_images(), "too large": too_large_image()}.items():
        yield case(f"bad image: {name}", INVALID, "spec.image", image=image)
        yield case(f"bad mask: {name}", INVALID, "spec.mask_image", image=png, mask_image=image)
    for strength in (0.05, 1.0):
        yield case(f"strength {strength}", image=png, strength=strength)
    for strength in (0.0, -0.1, 1.001, NAN, INF, -INF, 0.001):
        yield case(f"strength {strength}", INVALID, "spec.strength", image=png, strength=strength)
    yield case("strength without an image", INVALID, "spec.strength", strength=0.5)
    yield case("mask without an image", INVALID, "spec.mask_image", mask_image=png)


def _adapters(case: Any) -> Iterator[Case]:
    png = good_images()["png"]
    yield from lora_drawings(case)
    yield case("nine ControlNets", INVALID, "spec.controlnets", controlnets=[ControlNet(name="edges", image=png)] * 9)
    for name in ("", "x" * 201, "../../etc/passwd", "a b", "\0", "ü"):
        nets = [ControlNet(name=name, image=png)]
        yield case(f"ControlNet {shown(name)}", INVALID, "spec.controlnets[0].name", controlnets=nets)
    for scale in (NAN, INF, -INF):
        field, nets = "controlnet_conditioning_scale", [ControlNet(name="edges", image=png)]
        setattr(nets[0], field, scale)
        yield case(f"ControlNet scaled {scale}", INVALID, f"spec.controlnets[0].{field}", controlnets=nets)
    for start, end in ((0.5, 0.5), (-0.1, 1.0), (0.0, 1.1), (NAN, 1.0), (0.0, NAN)):
        nets = [ControlNet(name="edges", image=png, control_guidance_start=start, control_guidance_end=end)]
        field = "spec.controlnets[0].control_guidance_start"
        yield case(f"ControlNet from {start} to {end}", INVALID, field, controlnets=nets)
    yield from _control_images(case)
    yield from _controlnets(case, png)
    yield case("techniques", UNSERVED, techniques=Techniques(cache_entry="x"))
    for stale in (False, True):
        yield case(f"stale residuals {stale}", techniques=Techniques(stale_residuals=stale))
    both = Techniques(stale_residuals=True, masked_blocks=True)
    yield case("techniques of both kinds", UNSERVED, techniques=both)


def _control_images(case: Any) -> Iterator[Case]:
    field = "spec.controlnets[1].image"
    png = good_images()["png"]
    for name, image in {**good_images(), "the largest": largest_image()}.items():
        yield case(f"control image: {name}", controlnets=[ControlNet(name="edges", image=image)])
    bad = {**bad_images(), "too large": too_large_image(), "a bomb": png_of_size(50_000, 50_000)}
    for name, image in bad.items():
        nets = [ControlNet(name="edges", image=png), ControlNet(name="nobody", image=image)]
        yield case(f"bad control image: {name}", INVALID, field, controlnets=nets)
    yield case("no control image", INVALID, "spec.controlnets[0].image", controlnets=[ControlNet(name="edges")])


def _controlnets(case: Any, png: bytes) -> Iterator[Case]:
    def net(name: str = "edges", **facts: Any) -> ControlNet:
        return ControlNet(name=name, image=png, **facts)

    yield case("eight ControlNets", controlnets=[net()] * 8)
    yield case("the longest name", controlnets=[net(LONGEST_NAME)])
    for scale in (0.0, -1.0, 1e308, 5e-324):
        yield case(f"ControlNet scaled {scale}", controlnets=[net(controlnet_conditioning_scale=scale)])
    for start, end in ((0.0, 1.0), (0.0, 5e-324), (0.999, 1.0)):
        nets = [net(control_guidance_start=start, control_guidance_end=end)]
        yield case(f"ControlNet from {start} to {end}", controlnets=nets)
    yield case("guess mode", controlnets=[net(guess_mode=True)])
    yield case("a ControlNet that nobody hosts", NOT_FOUND, controlnets=[net(), net("nobody")])
    yield case("neither ControlNet nor model", NOT_FOUND, model="nobody", controlnets=[net("nobody")])
    yield case("a LoRA beside it", UNAVAILABLE, loras=[Lora(name="ink")], controlnets=[net("nobody")])
    wrong = [net("a b", controlnet_conditioning_scale=NAN, control_guidance_start=2.0), ControlNet()]
    fields = ("[0].name", "[0].controlnet_conditioning_scale", "[0].control_guidance_start", "[1].name", "[1].image")
    named = [f"spec.controlnets{field}" for field in fields]
    yield case("everything wrong with ControlNets", INVALID, "spec.width", *named, width=0, controlnets=wrong)


def _lists() -> Iterator[Case]:
    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, **request: Any) -> Case:
        return case_of("ListJobs", name, image_pb2.ListJobsRequest(**request), code, *fields)

    for size in (0, 1, 100):
        yield case(f"page_size {size}", page_size=size)
    for size in (-1, 101, 2**31 - 1, -(2**31)):
        yield case(f"page_size {size}", INVALID, "page_size", page_size=size)
    for token in ("x", "AAAA", "=" * 12, "\0", "ü" * 8, "../../etc/passwd", "x" * (1 << 20)):
        yield case(f"page_token {shown(token)}", INVALID, "page_token", page_token=token)
    yield case("all states", states=[1, 2, 3, 4, 5])
    for state in (0, 6, 99, -1):
        yield case(f"state {state}", INVALID, "states", states=[state])
    yield case("a thousand states", INVALID, "states", states=[1] * 1000)
    for name in ("created_after", "created_before"):
        for good in (0, -62_135_596_800, 253_402_300_799):
            moment: dict[str, Any] = {name: Timestamp(seconds=good)}
            yield case(f"{name} {good} s", **moment)
        for seconds in (-62_135_596_801, 253_402_300_800, 2**63 - 1, -(2**63)):
            yield case(f"{name} {seconds} s", INVALID, name, **{name: Timestamp(seconds=seconds)})
        for nanos in (-1, 10**9, 2**31 - 1):
            yield case(f"{name} {nanos} ns", INVALID, name, **{name: Timestamp(nanos=nanos)})
    both: dict[str, Any] = {name: Timestamp(nanos=-1) for name in ("created_after", "created_before")}
    yield case("everything at once", INVALID, *both, "page_size", "states", page_size=101, states=[99], **both)
    yield case_of("ListModels", "the only one", image_pb2.ListModelsRequest())
    yield case_of("ListMembers", "the only one", fleet_pb2.ListMembersRequest())


def _fleet() -> Iterator[Case]:
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
    yield from _hosted(case)
    yield from lora_loads(case)
    yield Case(method="Join", name="nothing", raw=(), code=INVALID, fields=frozenset({"registration"}))
    no_registration = fleet_pb2.JoinRequest(load=fleet_pb2.Load()).SerializeToString()
    yield Case(
        method="Join", name="load first", raw=(no_registration,), code=INVALID, fields=frozenset({"registration"})
    )


def _hosted(case: Any) -> Iterator[Case]:
    def net(name: str = "lines", /, **facts: Any) -> HostedControlNet:
        return HostedControlNet(**{"name": name, "digest": "ab", "state": HOSTED_STATE_LOADED, **facts})

    good = {
        "no": [],
        "a nameful of": [net(LONGEST_NAME, digest="x" * 128, base="x" * 128, size_bytes=2**63 - 1)],
        "1024": [net(f"n{number}") for number in range(1024)],
        "a bare": [HostedControlNet(name="lines")],
        "well profiled": [net(profiles=[_profile(f"m{number}") for number in range(16)])],
    }
    for name, nets in good.items():
        yield case(f"{name} ControlNets", kind=fleet_pb2.SERVICE_KIND_CONTROLNET, load=fleet_pb2.Load(controlnets=nets))
    bad = {
        "1025": [net(f"n{number}") for number in range(1025)],
        "twice the same": [net(), net()],
        "too long a hash": [net(digest="x" * 129)],
        "too long a base": [net(base="x" * 129)],
        **{f"called {shown(name)}": [net(name)] for name in ("", "x" * 201, "a b", "../up", "\0", "ü")},
        **{f"of negative {field}": [net(**{field: -1})] for field in ("size_bytes", "popularity", "sessions")},
        **{f"in state {state}": [net(state=state)] for state in (4, 99, -1)},
        "with a profile of nothing": [net(profiles=[ResidualProfile()])],
        "of similarity 2": [net(profiles=[ResidualProfile(model_hash="m", num_inference_steps=1, similarity=2)])],
        "with 17 profiles": [net(profiles=[_profile(f"m{number}") for number in range(17)])],
    }
    for name, nets in bad.items():
        for kind in (fleet_pb2.SERVICE_KIND_CONTROLNET, fleet_pb2.SERVICE_KIND_LORAS):
            whole = case(f"ControlNets {name}, from {kind}", kind=kind, load=fleet_pb2.Load(controlnets=nets))
            yield dataclasses.replace(whole, code=INVALID, fields=frozenset({"load.controlnets"}))


def _profile(model_hash: str) -> ResidualProfile:
    return ResidualProfile(model_hash=model_hash, num_inference_steps=200, similarity=-1.0)


def _attempts() -> Iterator[Case]:
    attempt = worker_pb2.AttemptId(job_id="fuzz", number=1)

    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, whole: Any = None, **spec: Any) -> Case:
        drawn = GenerationSpec(**{"prompt": "a star", **FILLED, **spec})
        request = worker_pb2.RunAttemptRequest(**{"attempt": attempt, "spec": drawn, **(whole or {})})
        return case_of("RunAttempt", name, request, code, *fields)

    yield case("a whole order")
    yield from _ranges(case)
    for name in FILLED:
        absent: dict[str, Any] = {name: None}
        yield case(f"without {name}", INVALID, f"spec.{name}", **absent)
    yield from _ordered_models(case)
    yield case("strength without an image", INVALID, "spec.strength", strength=0.5)
    yield case("an image without strength", INVALID, "spec.strength", image=good_images()["png"])
    for deadline_s in (-0.001, NAN, -INF):
        yield case(f"deadline_s {deadline_s}", INVALID, "deadline_s", whole={"deadline_s": deadline_s})
    for deadline_s in (1e308, INF):
        yield case(f"deadline_s {deadline_s}", whole={"deadline_s": deadline_s})
    yield case("request_id of 129", INVALID, "request_id", whole={"request_id": "x" * 129})
    for name, image in {**good_images(), "the largest": largest_image()}.items():
        yield case(f"good image: {name}", image=image, strength=0.5)
    for name, image in {"empty": b"", "too large": too_large_image()}.items():
        yield case(f"bad image: {name}", INVALID, "spec.image", image=image, strength=0.5)
    net = ControlNet(name="edges", image=good_images()["png"])
    yield case("a ControlNet without hosts", INVALID, "controlnets", controlnets=[net])
    bare = ("controlnets", "spec.controlnets[0].name", "spec.controlnets[0].image")
    yield case("a bare ControlNet", INVALID, *bare, controlnets=[ControlNet()])
    yield case("nine ControlNets", INVALID, "controlnets", "spec.controlnets", controlnets=[net] * 9)
    yield from lora_attempts(FILLED)
    for size in (500, 20 << 20):
        yield case(
            f"a checkpoint of {size} bytes of noise", whole={"checkpoint": bad_images()["noise"] * (size // 500)}
        )
    nothing = ("attempt.job_id", "attempt.number", *(f"spec.{name}" for name in FILLED))
    yield case_of("RunAttempt", "nothing at all", worker_pb2.RunAttemptRequest(), INVALID, *nothing)
    for method in ("RunAttempt", "CancelAttempt", "PreviewAttempt"):
        for job_id, number, field in (
            ("", 1, "job_id"),
            ("x" * 129, 1, "job_id"),
            ("x", 0, "number"),
            ("x", -1, "number"),
        ):
            broken = worker_pb2.AttemptId(job_id=job_id, number=number)
            request = getattr(worker_pb2, f"{method}Request")(attempt=broken)
            if method == "RunAttempt":
                request.spec.CopyFrom(GenerationSpec(**FILLED))
            yield case_of(method, f"attempt {shown(job_id)} {number}", request, INVALID, f"attempt.{field}")
    for method in ("CancelAttempt", "PreviewAttempt"):
        unknown = worker_pb2.AttemptId(job_id="x" * 128, number=2**31 - 1)
        yield case_of(method, "an unknown attempt", getattr(worker_pb2, f"{method}Request")(attempt=unknown))
    yield from _peer_links()
    yield case_of("ListAttempts", "the only one", worker_pb2.ListAttemptsRequest())
    yield case_of("WatchCheckpoints", "the only one", worker_pb2.WatchCheckpointsRequest())


def _ordered_models(case: Any) -> Iterator[Case]:
    yield case("this worker's model", model="miniature")
    for model in ("nobody", "", "\0", "x" * 200):
        yield case(f"model {shown(model)}", NOT_FOUND, model=model)
    for model in ("x" * 201, "x" * (1 << 20)):
        yield case(f"model {shown(model)}", INVALID, "spec.model", model=model)


def _peer_links() -> Iterator[Case]:
    """Of another worker that would lead this one, which has no peer."""
    for worker, model_hash, dtype, field in (
        ("", "x", "float32", "worker"),
        ("x" * 129, "x", "float32", "worker"),
        ("x", "", "float32", "terms.model_hash"),
        ("x", "x" * 129, "float32", "terms.model_hash"),
        ("x", "x", "", "terms.dtype"),
        ("x", "x", "x" * 129, "terms.dtype"),
    ):
        terms = worker_pb2.PeerTerms(model_hash=model_hash, dtype=dtype)
        request = worker_pb2.OpenPeerLinkRequest(worker=worker, terms=terms)
        name = f"peer {shown(worker)} {shown(model_hash)} {shown(dtype)}"
        yield case_of("OpenPeerLink", name, request, INVALID, field)
    terms = worker_pb2.PeerTerms(model_hash="x" * 128, dtype="x" * 128)
    stranger = worker_pb2.OpenPeerLinkRequest(worker="x" * 128, terms=terms, link_id="no name of a link")
    yield case_of("OpenPeerLink", "a stranger", stranger)


def _bytes() -> Iterator[Case]:
    """What is no message at all."""
    surrogate = b"\n\x03\xed\xa0\x80"  # a lone surrogate, as if UTF-8 had any, in the first field
    texts = ("GetJob", "CancelJob", "WatchJob", "GetImage", "Generate", "SubmitJob", "OpenLink", "AddControlNet")
    for method in texts:
        yield Case(method=method, name="a lone surrogate", raw=(surrogate,), code=INVALID)
    nets = ("Prefetch", "ListControlNets", "SetProfile")
    methods = (*texts, *nets, "ListJobs", "ListModels", "ListMembers", "Join", "RunAttempt", "CancelAttempt")
    for method in (*methods, "ListAttempts", "WatchCheckpoints", "PreviewAttempt", "OpenPeerLink"):
        yield Case(method=method, name="no message", raw=(b"\xff" * 9,), code=INVALID)
        yield Case(method=method, name="a length beyond the end", raw=(b"\n" + struct.pack("<B", 99),), code=INVALID)
    for method in ("SubmitJob", "RunAttempt"):
        huge = bytes(TOO_LARGE_BYTES)
        yield Case(method=method, name="beyond the limit", raw=(huge,), code=grpc.StatusCode.RESOURCE_EXHAUSTED)
