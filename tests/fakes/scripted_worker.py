"""A worker that speaks the real wire protocol and does what a test tells it: hold, die, answer late, go silent.

It draws nothing; its images are the bytes b"picture 0", b"picture 1", ... An attempt whose call breaks stays where it
is until the same attempt is asked for again.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bottega import kinds
from bottega.errors import BottegaError, Unavailable
from bottega.rpc.fleet_membership import FleetMembership
from bottega.rpc.link_service import add_link_service
from bottega.rpc.security.tls import TlsConfig
from bottega.rpc.server import Server
from bottega.rpc.status import to_job_error
from bottega.v1 import activations_pb2_grpc, fleet_pb2, generation_pb2, image_pb2, worker_pb2, worker_pb2_grpc
from bottega.v1.activations_pb2 import (
    DropTemplateRequest,
    DropTemplateResponse,
    ListTemplatesRequest,
    ListTemplatesResponse,
    ProfileBlocksRequest,
    ProfileBlocksResponse,
)
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, Hosted
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest
from bottega.worker.config import WorkerServerConfig
from tests.samples.hosted_loras import at_hand
from tests.support.addon_messages import loras_at, placements
from tests.support.waiting import EVENTUALLY_S

MODEL = image_pb2.Model(
    name="miniature",
    model_hash="ab" * 32,
    dtype="float32",
    default_width=64,
    default_height=64,
    size_multiple=8,
    max_pixels=512 * 512,
    max_side=4096,
    default_steps=30,
    default_guidance_scale=4.0,
    default_sampler=generation_pb2.SAMPLER_EULER,
    vae_scale_factor=4,
    base="base of the miniature",
)


@dataclass(slots=True)
class Script:
    """What the worker does with every attempt.

    hold_at: steps after which it waits for `release`; None waits nowhere. pace_s: seconds of a step.
    linger_s: for which a call goes on after its last message.
    loras_step: before which it says that LoRAs go in, of requests that have some.
    cached_starts: of every attempt, as it reports them.
    exact: as it says of every picture.
    latents: kept of each picture, where they are to be kept.
    similarity: of every ControlNet's residuals, where that is to be measured; similarities: of every LoRA's latents.
    """

    hold_at: int | None = None
    pace_s: float = 0.0
    linger_s: float = 0.0
    picture: Callable[[int], bytes] = lambda index: b"picture %d" % index
    latents: Callable[[int], bytes] = lambda index: b"latents %d" % index
    failure: BottegaError | None = None
    exact: bool = True
    preview: bytes = b""
    loras_step: int = 0
    cached_starts: Sequence[generation_pb2.CacheUse] = ()
    similarity: float | None = 0.995
    similarities: tuple[float, ...] = (1.0, 0.995, 0.98)
    release: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer, activations_pb2_grpc.TemplateServiceServicer):
    """One worker. `start` joins the gateway's fleet; `die` cuts everything at once."""

    def __init__(
        self,
        name: str,
        gateway: str,
        *,
        model: image_pb2.Model = MODEL,
        step_s: dict[int, float] | None = None,
        tls: TlsConfig | None = None,
    ) -> None:
        self.name = name
        self._instance = secrets.token_hex(16)
        self.script = Script()
        self.requests: list[worker_pb2.RunAttemptRequest] = []
        self.arrived = asyncio.Event()
        self.cancelled: asyncio.Queue[worker_pb2.AttemptId] = asyncio.Queue()
        self.checkpoints: asyncio.Queue[worker_pb2.WatchCheckpointsResponse] = asyncio.Queue()
        self._told_checkpoints: dict[str, worker_pb2.WatchCheckpointsResponse] = {}
        self.backlogs: list[int] = []
        self.lora_stores: list[tuple[str, str]] = []
        self.draining = False
        self.loras: list[str] = []
        self.applied_loras: list[Hosted] = []
        self.templates: list[str] = []
        self.mask_tokens: fleet_pb2.MaskTokens | None = None
        self.start_s = 0.0
        self._gateway = gateway
        self._model = model
        self._step_s = step_s or {}
        self._running: dict[tuple[str, int], int] = {}
        self._left_at: dict[tuple[str, int], int] = {}
        self.begun: list[tuple[str, int]] = []
        self.finished: list[tuple[str, int]] = []
        self.previewed: set[tuple[str, int]] = set()
        self._server = Server(name, WorkerServerConfig(drain_grace_s=0.1, tls=tls or TlsConfig()))
        self.address = ""
        self.membership: FleetMembership | None = None

    async def start(self, *, join_timeout_s: float = EVENTUALLY_S) -> ScriptedWorker:
        """Listens and joins. Raises TimeoutError when it is not let in by then; it keeps trying."""
        await self.listen()
        return await self.join(self.address, join_timeout_s=join_timeout_s)

    async def listen(self) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.grpc)
        activations_pb2_grpc.add_TemplateServiceServicer_to_server(self, self._server.grpc)
        add_link_service(self._server, kinds.WORKER, self)
        await self._server.start()
        self.address = self._server.address

    async def join(self, address: str, *, join_timeout_s: float = EVENTUALLY_S) -> ScriptedWorker:
        """Joins as one who is called at this address. Raises as `start` does."""
        self.address = address
        self.membership = FleetMembership(
            self._gateway,
            self.registration(),
            load=self.load,
            on_backlog=self.backlogs.append,
            on_services=self._take_services,
            channels=self._server.channels,
        )
        self.membership.start()
        await asyncio.wait_for(self.membership.joined.wait(), join_timeout_s)
        return self

    def _take_services(self, services: Sequence[fleet_pb2.ServiceAddress]) -> None:
        self.lora_stores = [(service.name, service.address) for service in services if service.kind == kinds.LORAS]

    def registration(self) -> fleet_pb2.Registration:
        return fleet_pb2.Registration(
            kind=kinds.WORKER,
            uses=[kinds.LORAS],
            name=self.name,
            address=self.address,
            version="test",
            models=[self._model],
            device="cpu",
            instance=self._instance,
        )

    def load(self) -> fleet_pb2.Load:
        return fleet_pb2.Load(
            running=[
                fleet_pb2.RunningAttempt(attempt=worker_pb2.AttemptId(job_id=job_id, number=number), steps_left=left)
                for (job_id, number), left in self._running.items()
            ],
            step_times=[
                fleet_pb2.StepTime(latent_height=16, latent_width=16, rows=rows, seconds=seconds)
                for rows, seconds in self._step_s.items()
            ],
            draining=self.draining,
            max_rows=16,
            hosted=[*at_hand(*self.loras), *self.applied_loras, *_templates(self.templates)],
            mask_tokens=self.mask_tokens,
            switch_times=[fleet_pb2.SwitchTime(kind=kinds.LORAS, seconds=0.1)],
            start_s=self.start_s,
        )

    def still_running(self, job_id: str, number: int) -> None:
        """Reports an attempt as running, whatever has become of it."""
        self._running[job_id, number] = 10

    async def die(self) -> None:
        """Everything of it ends at once, as when its process is killed."""
        await self._server.grpc.stop(0)
        await self.leave()
        await self._server.stop()

    async def leave(self) -> None:
        """Leaves the fleet; attempts go on."""
        if self.membership is not None:
            await self.membership.stop()

    async def RunAttempt(
        self, request: worker_pb2.RunAttemptRequest, context: object
    ) -> AsyncIterator[worker_pb2.RunAttemptResponse]:
        key = (request.attempt.job_id, request.attempt.number)
        spec, script = request.spec, self.script
        self.requests.append(request)
        if key not in self._left_at:
            self.begun.append(key)
        if request.preview:
            self.previewed.add(key)
        self.arrived.set()
        total = spec.num_inference_steps * spec.num_images
        resumed = int(request.checkpoint or b"0")
        started = worker_pb2.AttemptStarted(steps_total=total, steps_resumed=resumed)
        yield worker_pb2.RunAttemptResponse(started=started)
        try:
            for step in range(self._left_at.get(key, resumed) + 1, total + 1):
                self._running[key] = total - step
                self._left_at[key] = step - 1
                if spec.loras and step - 1 == script.loras_step:
                    decisions = worker_pb2.AttemptDecisions(by_kind=loras_at(step - 1))
                    yield worker_pb2.RunAttemptResponse(decided=decisions)
                preview = script.preview if key in self.previewed else b""
                yield worker_pb2.RunAttemptResponse(
                    progress=worker_pb2.AttemptProgress(steps_done=step, preview_jpeg=preview)
                )
                if step == script.hold_at:
                    await script.release.wait()
                await asyncio.sleep(script.pace_s)
            for answer in self._answers(request, script):
                yield answer
            self._left_at.pop(key, None)
            await asyncio.sleep(script.linger_s)
            self.finished.append(key)
        finally:
            self._running.pop(key, None)

    def _answers(self, request: worker_pb2.RunAttemptRequest, script: Script) -> list[worker_pb2.RunAttemptResponse]:
        if script.failure is not None:
            return [worker_pb2.RunAttemptResponse(failed=to_job_error(script.failure))]
        chunks = []
        for index in range(request.spec.num_images):
            for part, last in _halves(script.picture(index)):
                chunk = worker_pb2.AttemptImageChunk(index=index, chunk=part, last=last)
                chunks.append(worker_pb2.RunAttemptResponse(image=chunk))
            for part, last in _halves(script.latents(index)) if request.spec.keep_for_editing else ():
                kept = worker_pb2.AttemptKeptChunk(index=index, chunk=part, last=last)
                chunks.append(worker_pb2.RunAttemptResponse(kept=kept))
        provenance = generation_pb2.Provenance(
            worker=self.name,
            exact=script.exact,
            model_hash=self._model.model_hash,
            dtype=self._model.dtype,
            controlnets=_uses(request, script.similarity),
            loras=_lora_uses(request, script),
            cached_starts=script.cached_starts,
        )
        completed = worker_pb2.AttemptCompleted(provenance=provenance)
        return [*chunks, worker_pb2.RunAttemptResponse(completed=completed)]

    async def CancelAttempt(
        self, request: worker_pb2.CancelAttemptRequest, context: object
    ) -> worker_pb2.CancelAttemptResponse:
        await self.cancelled.put(request.attempt)
        self._left_at.pop((request.attempt.job_id, request.attempt.number), None)
        return worker_pb2.CancelAttemptResponse(known=True)

    async def PreviewAttempt(
        self, request: worker_pb2.PreviewAttemptRequest, context: object
    ) -> worker_pb2.PreviewAttemptResponse:
        key = (request.attempt.job_id, request.attempt.number)
        self.previewed.add(key)
        return worker_pb2.PreviewAttemptResponse(known=key in self._running)

    async def ListTemplates(self, request: ListTemplatesRequest, context: object) -> ListTemplatesResponse:
        return ListTemplatesResponse()

    async def DropTemplate(self, request: DropTemplateRequest, context: object) -> DropTemplateResponse:
        return DropTemplateResponse()

    async def ProfileBlocks(self, request: ProfileBlocksRequest, context: object) -> ProfileBlocksResponse:
        return ProfileBlocksResponse()

    async def ListAttempts(
        self, request: worker_pb2.ListAttemptsRequest, context: object
    ) -> worker_pb2.ListAttemptsResponse:
        names = [worker_pb2.AttemptId(job_id=job_id, number=number) for job_id, number in self._running | self._left_at]
        return worker_pb2.ListAttemptsResponse(attempts=[worker_pb2.AttemptSummary(attempt=name) for name in names])

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        raise Unavailable("a scripted worker has no peer")

    async def WatchCheckpoints(
        self, request: worker_pb2.WatchCheckpointsRequest, context: object
    ) -> AsyncIterator[worker_pb2.WatchCheckpointsResponse]:
        for newest in self._told_checkpoints.values():
            yield newest
        while True:
            checkpoint = await self.checkpoints.get()
            self._told_checkpoints[checkpoint.attempt.job_id] = checkpoint
            yield checkpoint


def _halves(data: bytes) -> tuple[tuple[bytes, bool], tuple[bytes, bool]]:
    half = len(data) // 2
    return (data[:half], False), (data[half:], True)


def _uses(request: worker_pb2.RunAttemptRequest, similarity: float | None) -> Iterator[generation_pb2.ControlNetUse]:
    """Of each ControlNet its best server, as if nothing had happened on the way."""
    for net, hosts in zip(request.spec.controlnets, placements(request.addons), strict=True):
        yield generation_pb2.ControlNetUse(
            name=net.name,
            digest=hosts.digest,
            image_digest=hashlib.sha256(net.image).hexdigest(),
            scale=net.controlnet_conditioning_scale,
            servers=[server.name for server in hosts.servers[:1]],
            mode=generation_pb2.RESIDUAL_MODE_SYNCHRONOUS,
            waited_s=0.25,
            similarity=similarity if net.measure_similarity else None,
        )


def _lora_uses(request: worker_pb2.RunAttemptRequest, script: Script) -> Iterator[generation_pb2.LoraUse]:
    for lora in request.spec.loras:
        yield generation_pb2.LoraUse(
            name=lora.name,
            digest=lora.digest,
            scale=lora.scale,
            from_step=script.loras_step,
            similarities=script.similarities if lora.measure_similarity else (),
        )


def _templates(sources: Sequence[str]) -> list[Hosted]:
    """Activations of these are in its memory."""
    return [Hosted(kind=kinds.ACTIVATIONS, digest=source, state=HOSTED_STATE_LOADED) for source in sources]
