"""The gateway's rules without a wire: a job controller with its fleet, on a clock that the test turns.

Its workers are calls that wait for what the test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from prometheus_client import CollectorRegistry

from bottega import kinds
from bottega.addons.controlnets.gateway.addon import ControlNetAddOn
from bottega.addons.interface.gateway_addon import AddOn, AddOnMetrics
from bottega.addons.interface.views import Member
from bottega.addons.loras.gateway.addon import LoraAddOn
from bottega.errors import BottegaError, WorkerLost
from bottega.gateway.config import GatewayConfig
from bottega.gateway.dispatch.worker_client import WorkerClient
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.periodic_checks import PeriodicChecks
from bottega.gateway.scheduling.controller import JobController
from bottega.gateway.scheduling.stages import StageRoles
from bottega.gateway.tenants import TenantTerms
from bottega.rpc.channel import Target
from bottega.v1 import fleet_pb2, image_pb2, worker_pb2
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.hosted_pb2 import Hosted
from tests.fakes.fake_time import FakeTime
from tests.fakes.memory_storage import Shelf, at_once, memory_storage
from tests.samples import controlnet_hosts
from tests.samples.jobs import sample_job

Answer = worker_pb2.RunAttemptResponse | BottegaError


@dataclass(slots=True)
class FakeClient:
    """A worker: what it was asked to run, and by job what it answers. on_call: at every RunAttempt.

    news: its checkpoints; None among them breaks the stream in a way that nobody thought of.
    stopped: attempts that it was told to stop, as job and number.
    """

    on_call: Callable[[], None] = lambda: None
    called: list[str] = field(default_factory=list)
    requests: list[worker_pb2.RunAttemptRequest] = field(default_factory=list)
    answers: dict[str, asyncio.Queue[Answer]] = field(default_factory=dict)
    news: asyncio.Queue[worker_pb2.WatchCheckpointsResponse | None] = field(default_factory=asyncio.Queue)
    stopped: list[tuple[str, int]] = field(default_factory=list)

    def run_attempt(self, request: worker_pb2.RunAttemptRequest) -> AsyncGenerator[worker_pb2.RunAttemptResponse, None]:
        self.on_call()
        self.called.append(request.attempt.job_id)
        self.requests.append(request)
        answers = self.answers[request.attempt.job_id] = asyncio.Queue()
        return self._events(answers)

    async def _events(self, answers: asyncio.Queue[Answer]) -> AsyncGenerator[worker_pb2.RunAttemptResponse, None]:
        while True:
            answer = await answers.get()
            if isinstance(answer, BottegaError):
                raise answer
            yield answer

    async def checkpoints(self) -> AsyncGenerator[worker_pb2.WatchCheckpointsResponse, None]:
        while (checkpoint := await self.news.get()) is not None:
            yield checkpoint
        raise ValueError("what no client should raise")

    async def cancel_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        self.stopped.append((attempt.job_id, attempt.number))

    async def list_attempts(self, *, deadline_s: float) -> Sequence[worker_pb2.AttemptSummary]:
        """It has nothing that nobody follows."""
        return ()

    async def preview_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        """Nothing to show."""

    async def close(self) -> None:
        """Nothing to end."""


@dataclass(slots=True)
class FakeServer:
    """A ControlNet server: what it was asked to load, request by request. failure: what it answers instead."""

    prefetched: list[list[str]] = field(default_factory=list)
    failure: Exception | None = None
    closed: bool = False

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        self.prefetched.append(list(names))
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        self.closed = True


class Shop:
    """A job controller of the model "m" and everything that it looks at. Made in a running event loop."""

    def __init__(
        self,
        *,
        max_attempts: int = 3,
        hold_s: float = 3,
        addons: Sequence[AddOn] = (),
        max_members: int = 256,
        model_grace_s: float = 30.0,
        terms: TenantTerms | None = None,
    ) -> None:
        self.time = FakeTime()
        self.clients: dict[str, FakeClient] = {}
        self.servers: dict[str, FakeServer] = {}
        self.evictors: dict[str, FakeServer] = {}
        self.shelf = Shelf()
        self._max_attempts = max_attempts
        self._hold_s = hold_s
        self._addons = addons
        self._max_members = max_members
        self._model_grace_s = model_grace_s
        self._terms = terms or TenantTerms()
        self.open()

    def open(self) -> None:
        """A life of the gateway begins, with what the one before has left; without room it waits for `heal`."""
        clock = self.time.clock()
        self.registry = CollectorRegistry()
        metrics, of_addons = GatewayMetrics(self.registry), AddOnMetrics(self.registry)
        self.fleet = Fleet(
            lease_s=1.5,
            model_grace_s=self._model_grace_s,
            bounds=controlnet_hosts.bounds(self._max_members),
            clock=clock,
        )
        self.storage = memory_storage(clock, self.shelf)
        self.log = JobRepository(storage=self.storage, clock=clock)
        self.controlnets = ControlNetAddOn(
            fleet=self.fleet,
            connect=self._connect_server,
            connect_to_copy=self._connect_server,
            connect_to_evict=lambda target: self.evictors.setdefault(target.address, FakeServer()),
            metrics=of_addons,
            clock=clock,
        )
        config = GatewayConfig(
            max_queued=1000, max_attempts=self._max_attempts, max_result_bytes=1 << 20, hold_s=self._hold_s
        )
        roles = StageRoles(self.fleet, clock, grace_s=config.model_grace_s)
        addons = (LoraAddOn(self.fleet, of_addons), self.controlnets, roles, *self._addons)
        self.controller = JobController(
            config=config,
            fleet=self.fleet,
            jobs=self.log,
            addons=addons,
            connect=self._connect,
            terms=self._terms,
            metrics=metrics,
            clock=clock,
        )
        self.periodic = PeriodicChecks(
            fleet=self.fleet,
            controller=self.controller,
            addons=addons,
            worker_grace_s=config.model_grace_s,
            clock=clock,
        )
        self.queue, self.dispatcher = self.controller.queue, self.controller._dispatcher
        if self.storage.trouble is None:
            self._open_storage()
        else:
            self.log.allow_reads()

    def start(self) -> None:
        """What is checked by the clock is checked from now on."""
        self.controller.start()
        self.periodic.start()

    async def stop(self) -> None:
        """This life of the gateway ends."""
        await self.periodic.stop()
        await self.controller.stop()

    def heal(self) -> None:
        """There is room on the disk again, and the gateway finds out."""
        self.shelf.full = False
        self._open_storage()

    def _open_storage(self) -> None:
        at_once(self.storage.open(restore=self._restore))
        self.controller.scheduler.schedule_all()

    async def _restore(self) -> None:
        if not self.log.restored:
            self.controller.restore(await self.log.restore())
            self.periodic.start_grace()

    def worker(self, name: str = "w1", *, seconds: float = 0.1, asks: Sequence[str] = ()) -> Member:
        """A worker joins and reports turns whose time doubles with their rows. seconds: of one row.

        asks: stages that others compute for it.
        """
        model = image_pb2.Model(name="m", model_hash="hash of m", vae_scale_factor=4)
        address = f"127.0.0.1:{len(self.clients) + 1}"
        said = fleet_pb2.Registration(kind=kinds.WORKER, name=name, address=address, models=[model], uses=asks)
        member = self.fleet.join(controlnet_hosts.again(said))
        self.report(member, seconds=seconds)
        return member

    def report(
        self,
        member: Member,
        *,
        seconds: float = 0.1,
        fixed_s: float = 0.0,
        draining: bool = False,
        controlnets: Sequence[Hosted] = (),
        beside_s: float = 0.0,
    ) -> None:
        """A worker reports its load. seconds: of one row, beside fixed_s of each turn. controlnets: at hand there.

        beside_s: what a job takes beside its turns.
        """
        times = [
            fleet_pb2.StepTime(latent_height=16, latent_width=16, rows=rows, seconds=fixed_s + rows * seconds)
            for rows in (1, 2)
        ]
        running = [
            fleet_pb2.RunningAttempt(
                attempt=worker_pb2.AttemptId(job_id=job.job_id, number=job.number),
                steps_left=job.steps.total - job.steps.done,
            )
            for job in self.running(member)
        ]
        load = fleet_pb2.Load(
            step_times=times,
            fixed_s=beside_s,
            max_rows=16,
            draining=draining,
            running=running,
            hosted=controlnets,
            mask_tokens=fleet_pb2.MaskTokens(token_elements=2),
        )
        self.fleet.report(member, load)

    def running(self, member: Member) -> list[Job]:
        """Jobs that are with a worker."""
        return [job for job in self.log.live() if job.worker == member.name]

    def member(self, name: str) -> Member:
        (member,) = (member for member in self.fleet.members() if member.name == name)
        return member

    async def step(self, member: Member) -> None:
        """Everything with a worker makes a step; what has made its last one is completed."""
        for job in self.running(member):
            if job.steps.done < job.steps.total:
                await self.advance(job, job.steps.done + 1)
            else:
                await self.complete(job)

    async def kill(self, member: Member) -> None:
        """A worker's engine dies, and all its calls say so, one after the other; the worker has another one at once."""
        running = self.running(member)
        facts = {"died": "engine", "held_together": str(len(running))}
        calls = [self.client(member.name).answers[job.job_id] for job in running]
        for answers in calls:
            answers.put_nowait(WorkerLost("the engine died", metadata=facts))
        for _ in range(12):
            await asyncio.sleep(0)

    def client(self, name: str = "w1") -> FakeClient:
        return self.clients[self.member(name).registration.address]

    def submit(self) -> Job:
        return self.take(sample_job(self.time))

    def take(self, job: Job) -> Job:
        at_once(self.log.add(job))
        self.controller.submit(job)
        return job

    async def advance(self, job: Job, steps_done: int, *, device_s: float = 0.0) -> None:
        """The job's worker tells progress. device_s: that it has used of its device; 0 is not said."""
        progress = worker_pb2.AttemptProgress(steps_done=steps_done, device_s=device_s)
        await self._answer(job, worker_pb2.RunAttemptResponse(progress=progress))

    async def complete(
        self, job: Job, *, device_s: float = 0.0, plain_s: float = 0.0, controlnets_s: float = 0.0
    ) -> None:
        """The job's worker sends its picture. device_s: that it has used of its device; 0 is not said.

        plain_s, controlnets_s: of its turns without add-ons, and what ControlNets added.
        """
        chunk = worker_pb2.AttemptImageChunk(index=0, chunk=b"picture", last=True)
        await self._answer(job, worker_pb2.RunAttemptResponse(image=chunk))
        provenance = Provenance(worker=job.worker, device_s=device_s, plain_s=plain_s, controlnets_s=controlnets_s)
        completed = worker_pb2.AttemptCompleted(provenance=provenance)
        await self._answer(job, worker_pb2.RunAttemptResponse(completed=completed))
        await job.ended.wait()

    async def fail(self, job: Job, error: BottegaError) -> None:
        """The call to the job's worker ends with an error."""
        await self._answer(job, error)

    async def _answer(self, job: Job, answer: Answer) -> None:
        self.client(job.worker).answers[job.job_id].put_nowait(answer)
        for _ in range(12):  # the queue wakes its reader, which wakes the attempt; what ends is written, and told then
            await asyncio.sleep(0)

    def _connect_server(self, target: Target) -> FakeServer:
        return self.servers.setdefault(target.address, FakeServer())

    def _connect(self, target: Target) -> WorkerClient:
        return cast(WorkerClient, self.clients.setdefault(target.address, FakeClient()))
