"""Fuzzing of one method: hypothesis makes requests, the house answers, what is wrong is kept, as small as may be."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import hypothesis
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from bottega import kinds
from bottega.v1 import (
    activations_pb2,
    cache_pb2,
    controlnet_pb2,
    fleet_pb2,
    generation_pb2,
    image_pb2,
    lora_pb2,
    worker_pb2,
)
from bottega.v1.activations_pb2 import DropTemplateRequest, ListTemplatesRequest, ProfileBlocksRequest
from bottega.v1.controlnet_pb2 import ControlNetHosts
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec, Lora, Techniques
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED
from tests.fuzz import activations, cache, controlnets, jobs, links, lora_store, webhooks
from tests.fuzz.calls import SERVICES
from tests.fuzz.edits import edit
from tests.fuzz.house import House
from tests.fuzz.images import good_images
from tests.fuzz.judging import fault
from tests.fuzz.mutations import mutated
from tests.fuzz.specs import FILLED
from tests.support.addon_messages import placed

# Of one method; the same fault comes in many shapes.
_MOST_FOUND = 3
_INTERNAL = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
_SHOWN_BYTES = 300
# Requests between two looks at the time.
_AT_ONCE = 20
# Of one kind, by name: while the lease of one that has left runs, others join.
_PROCESSES = 20
_LORAS = lora_pb2.DESCRIPTOR.services_by_name["LoraService"].full_name
_CACHE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
_ACTIVATIONS = activations_pb2.DESCRIPTOR.services_by_name["ActivationService"].full_name


_OF_JOBS = frozenset({"GetImage", "GetJob", "GetJobTrace", "WatchJob", "CancelJob", "DeleteJob"})
"""Methods for one job: they are asked for one that has been drawn."""

_OF_TEMPLATES: Mapping[str, Sequence[Message]] = {
    "ListTemplates": [ListTemplatesRequest()],
    "DropTemplate": [DropTemplateRequest(id="0123456789abcdef")],
    # Small pictures, each of which is measured in half the time of the model's own.
    "ProfileBlocks": [ProfileBlocksRequest(width=8, height=8), ProfileBlocksRequest(width=16, height=8)],
}


class Found(Exception):
    """A request got an answer that no request may get."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came of the requests of one method."""

    codes: Counter[grpc.StatusCode] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(self.codes.values())

    @property
    def accepted(self) -> int:
        return self.codes[grpc.StatusCode.OK]

    @property
    def internal(self) -> int:
        """How many got a status of our own fault."""
        return sum(self.codes[code] for code in _INTERNAL)


def fuzz(
    house: House, method: str, requests: int, seed: int, tally: Tally | None = None, *, seconds: float = math.inf
) -> Tally:
    """Sends so many mutated requests, or fewer: as many as take so many seconds, unless too much is found on the way.

    tally: of those that were sent before.
    """
    tally, ends = tally or Tally(), time.monotonic() + seconds
    if SERVICES[method] == _LORAS:
        strategy = _lora_requests(method, house.lose() if method in lora_store.OF_QUARANTINE else house.bring())
    elif SERVICES[method] == _CACHE:
        entry = house.keep()
        strategy = mutated(cache.valid(method, entry), (*cache.WORDS, entry)).map(lambda raw: (raw,))
    elif SERVICES[method] == _ACTIVATIONS:
        template = house.template()
        words = (*activations.WORDS, template)
        strategy = mutated(activations.valid(method, template), words).map(lambda raw: (raw,))
    else:
        strategy = _requests(method, house.draw() if method in _OF_JOBS else "fuzz", house.digest)

    def answer_is_right(raw: tuple[bytes, ...]) -> None:
        outcome = house.caller.call(method, raw)
        tally.codes[outcome.code] += 1
        problem = fault(method, raw, outcome) or ", ".join(f"{name} is dead" for name in house.dead())
        if problem:
            raise Found(f"{method}: {problem}\n  {[part[:_SHOWN_BYTES] for part in raw]}")

    while tally.requests < requests and len(tally.found) < _MOST_FOUND and not house.dead():
        if time.monotonic() > ends:
            break
        left = requests - tally.requests
        settings = hypothesis.settings(
            max_examples=left if seconds == math.inf else min(left, _AT_ONCE),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        # A test of its own for every run: one that has its settings takes no others.
        run = settings(hypothesis.seed(seed + tally.requests)(hypothesis.given(strategy)(answer_is_right)))
        try:
            run()
        except* Found as group:  # several if what was found did not come again (FlakyFailure)
            tally.found += map(str, group.exceptions)
    return tally


def _requests(method: str, job_id: str, digest: str) -> st.SearchStrategy[tuple[bytes, ...]]:
    words = (job_id, "fuzz", "miniature")
    if SERVICES[method] == controlnet_pb2.DESCRIPTOR.services_by_name["ControlNetService"].full_name:
        return mutated(controlnets.valid(method, digest), (*words, controlnets.NET)).map(lambda raw: (raw,))
    if method != "Join":
        return mutated(_valid(method, job_id), words).map(lambda raw: (raw,))
    first = mutated([fleet_pb2.JoinRequest(registration=registration) for registration in _registrations()], words)
    later = mutated([fleet_pb2.JoinRequest(load=_load()), *_valid("Join", job_id)], words)
    return st.tuples(first, st.lists(later, max_size=2)).map(lambda said: (said[0], *said[1]))


def _lora_requests(method: str, digest: str) -> st.SearchStrategy[tuple[bytes, ...]]:
    valid, words = lora_store.valid(method, digest), (*lora_store.WORDS, digest)
    if method == "UploadLora":
        return st.tuples(*(mutated([message], words) for message in valid))
    return mutated(valid, words).map(lambda raw: (raw,))


def _valid(method: str, job_id: str) -> Sequence[Message]:
    match method:
        case "Generate" | "SubmitJob":
            kind = getattr(image_pb2, f"{method}Request")
            waits: Sequence[tuple[str, float | None]] = (("", None), ("fuzz", None), ("fuzz", 60.0))
            whole = [kind(request_id=name, spec=spec, deadline_s=s) for spec in _specs() for name, s in waits]
            return [*whole, webhooks.submission()] if method == "SubmitJob" else whole
        case _ if method in _OF_JOBS:
            return [getattr(image_pb2, f"{method}Request")(job_id=job_id)]
        case "ListJobs":
            moments: Any = {"created_after": {"seconds": 1}, "created_before": {"seconds": 1 << 32, "nanos": 1}}
            return [
                image_pb2.ListJobsRequest(),
                image_pb2.ListJobsRequest(
                    page_size=9, states=[image_pb2.JOB_STATE_COMPLETED, image_pb2.JOB_STATE_CANCELLED], **moments
                ),
            ]
        case "ListAdapters":
            return [image_pb2.ListAdaptersRequest(kind=image_pb2.ADAPTER_KIND_LORA, page_size=9, page_token="2/ink/")]
        case "ListModels":
            return [image_pb2.ListModelsRequest()]
        case "ListMembers" | "AdmitJobs":
            return [fleet_pb2.ListMembersRequest() if method == "ListMembers" else jobs.admission()]
        case "ListWebhookEvents" | "ReplayWebhookEvents":
            return webhooks.valid(method)
        case "Join":
            return [fleet_pb2.JoinRequest(load=_load())]
        case "RunAttempt":
            orders = [worker_pb2.RunAttemptRequest(attempt=_attempt(), spec=spec) for spec in _whole_specs()]
            return [*orders, _controlled_order()]
        case "CancelAttempt" | "PreviewAttempt":
            return [getattr(worker_pb2, f"{method}Request")(attempt=_attempt())]
        case "OpenLink":
            return links.valid()
        case _:
            return _OF_TEMPLATES.get(method) or [getattr(worker_pb2, f"{method}Request")()]


def _specs() -> Sequence[GenerationSpec]:
    """One with nothing but a prompt, some with all that is served, one with services that are not here."""
    return [GenerationSpec(model="miniature", prompt="a big red star"), *_whole_specs(), _controlled(), _styled_edit()]


def _whole_specs() -> Sequence[GenerationSpec]:
    plain = GenerationSpec(model="miniature", prompt="a big red star", **FILLED)
    redrawn = GenerationSpec(
        image=good_images()["png"], strength=0.5, negative_prompt="", quality=70, use_karras_sigmas=True
    )
    redrawn.MergeFrom(plain)
    redrawn.sampler, redrawn.format = generation_pb2.SAMPLER_EULER, generation_pb2.IMAGE_FORMAT_WEBP
    edited = GenerationSpec(**edit(padding_mask_crop=8))
    edited.MergeFrom(plain)
    return [plain, redrawn, edited]


def _controlled() -> GenerationSpec:
    image = good_images()["png"]
    spec = GenerationSpec(model="miniature", prompt="a star", techniques=Techniques(stale_residuals=True))
    spec.controlnets.add(name="edges", image=image, controlnet_conditioning_scale=0.5, guess_mode=True)
    spec.controlnets.add(name="edges", image=image, control_guidance_start=0.25, control_guidance_end=0.5)
    return spec


def _styled_edit() -> GenerationSpec:
    png = good_images()["png"]
    spec = GenerationSpec(prompt="a big red star", techniques=Techniques(masked_blocks=True), **edit())
    spec.loras.append(Lora(name="ink", scale=0.5, from_step=3))
    spec.controlnets.append(ControlNet(name="edges", image=png, control_guidance_end=0.5))
    return spec


def _controlled_order() -> worker_pb2.RunAttemptRequest:
    """With a ControlNet on a server where nobody listens."""
    spec = GenerationSpec(model="miniature", prompt="a star", **FILLED)
    spec.controlnets.add(name="edges", image=good_images()["png"], controlnet_conditioning_scale=0.5)
    hosts = ControlNetHosts(digest="ab" * 32, similarity=0.999)
    hosts.servers.add(name="nowhere", address="127.0.0.1:1")
    return worker_pb2.RunAttemptRequest(attempt=_attempt(), spec=spec, preview=True, addons=placed([hosts]))


def _registrations() -> Sequence[fleet_pb2.Registration]:
    """A worker of a model of its own, and two others: what takes jobs from the real worker is no bad input.

    Of each many processes: the name of one that has just left is not free yet.
    """
    return [_process(kind, number) for kind in _kinds() for number in range(_PROCESSES)]


def _process(kind: fleet_pb2.Registration, number: int) -> fleet_pb2.Registration:
    process = fleet_pb2.Registration(instance=f"{kind.name} {number:020}")
    process.MergeFrom(kind)
    process.name = f"{kind.name} {number}"
    return process


def _kinds() -> Sequence[fleet_pb2.Registration]:
    model = image_pb2.Model(name="other", model_hash="ab" * 32, dtype="float32", default_width=64, default_height=64)
    worker = fleet_pb2.Registration(
        kind=kinds.WORKER, name="other", address="127.0.0.1:1", models=[model], device="cpu"
    )
    store = fleet_pb2.Registration(kind=kinds.LORAS, name="loras", address="localhost:1", version="0.1.0")
    server = fleet_pb2.Registration(kind=kinds.CONTROLNET, name="others", address="127.0.0.1:1")
    return [worker, store, server]


def _load() -> fleet_pb2.Load:
    load = fleet_pb2.Load(fixed_s=0.1, max_rows=16, memory_bytes=1 << 30)
    load.running.add(attempt=_attempt(), steps_left=7)
    load.step_times.add(latent_height=16, latent_width=16, rows=2, seconds=0.02)
    net = load.hosted.add(kind=kinds.CONTROLNET, name="lines", digest="ab" * 32, base="other", size_bytes=1 << 20)
    net.state, net.popularity, net.sessions = HOSTED_STATE_LOADED, 7, 2
    return load


def _attempt() -> worker_pb2.AttemptId:
    return worker_pb2.AttemptId(job_id="fuzz", number=1)
