"""A real gateway on port 0 for the tests of one event loop, with stubs to call it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from bottega.errors import BottegaError
from bottega.gateway.config import FleetConfig, GatewayConfig, GatewayServerConfig
from bottega.gateway.gateway import Gateway
from bottega.rpc.channel import PLAINTEXT, Channels, Target
from bottega.rpc.security.caller import Role
from bottega.rpc.security.tls import TlsConfig
from bottega.rpc.status import from_rpc_error
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2, image_pb2_grpc, worker_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.hosted_pb2 import Hosted
from tests.fakes.scripted_controlnet import ScriptedControlNetServer
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.waiting import eventually

# Far more than a call takes on a machine that has other work.
_CALL_S = 60.0


@dataclass(slots=True, kw_only=True)
class Running:
    """A gateway that serves, its stubs, and its workers."""

    gateway: Gateway
    channel: grpc.aio.Channel
    images: image_pb2_grpc.ImageServiceAsyncStub
    fleet: fleet_pb2_grpc.FleetServiceAsyncStub
    fleet_channel: grpc.aio.Channel
    workers: list[ScriptedWorker] = field(default_factory=list)
    servers: list[ScriptedControlNetServer] = field(default_factory=list)

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return self.gateway.server.address

    @property
    def fleet_address(self) -> str:
        """host:port where services join it."""
        return self.gateway.fleet_listener.address

    async def worker(self, name: str = "w1", *, hold_at: int | None = None, **kwargs: Any) -> ScriptedWorker:
        """Adds a scripted worker; it goes when the gateway goes. hold_at: the step at which it waits, for a release."""
        worker = ScriptedWorker(name, self.fleet_address, **kwargs)
        worker.script.hold_at = hold_at
        await worker.start()
        self.workers.append(worker)
        return worker

    async def controlnets(self, name: str, *nets: Hosted) -> ScriptedControlNetServer:
        """Adds a scripted ControlNet server, whose first report is heard; it goes when the gateway goes."""
        server = await ScriptedControlNetServer(name, self.fleet_address, nets).start()
        self.servers.append(server)
        await self.until_joined(name, hosted=len(nets))
        return server

    async def until_joined(self, name: str, *, hosted: int = 0) -> None:
        """Return when a service of that name has joined and reports that it hosts so much."""

        async def joined() -> bool:
            members = (await self.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=_CALL_S)).members
            return any(each.registration.name == name and len(each.load.hosted) >= hosted for each in members)

        await eventually(joined, f"{name} to join")

    async def knows_a_worker(self) -> bool:
        """Whether a worker has joined."""
        members = (await self.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=_CALL_S)).members
        return any(member.registration.models for member in members)

    async def queued(self) -> int:
        """Number of jobs that wait."""
        return (await self.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=_CALL_S)).queued

    def generate(
        self, request_id: str = "", *, preview: bool = False, timeout: float | None = _CALL_S, **spec: Any
    ) -> grpc.aio.UnaryStreamCall[image_pb2.GenerateRequest, image_pb2.GenerateResponse]:
        """Calls Generate with these fields of the spec."""
        request = image_pb2.GenerateRequest(request_id=request_id, spec=GenerationSpec(**spec), preview=preview)
        return self.images.Generate(request, timeout=timeout)

    async def draw(self, request_id: str = "", **spec: Any) -> image_pb2.Completed:
        events = [answer.event async for answer in self.generate(request_id, **spec)]
        return events[-1].completed

    async def submit(self, request_id: str = "", **spec: Any) -> image_pb2.Job:
        request = image_pb2.SubmitJobRequest(request_id=request_id, spec=GenerationSpec(**spec))
        return (await self.images.SubmitJob(request, timeout=_CALL_S)).job

    async def job(self, job_id: str) -> image_pb2.Job:
        return (await self.images.GetJob(image_pb2.GetJobRequest(job_id=job_id), timeout=_CALL_S)).job

    async def ended(self, job_id: str) -> image_pb2.Job:
        """Watches a job to its end; the job then."""
        async for _ in self.images.WatchJob(image_pb2.WatchJobRequest(job_id=job_id), timeout=_CALL_S):
            pass
        return await self.job(job_id)

    async def image(self, job_id: str) -> bytes:
        """The first image of a job."""
        chunks = [answer.chunk async for answer in self.images.GetImage(image_pb2.GetImageRequest(job_id=job_id))]
        return b"".join(chunks)

    async def listed(self) -> list[str]:
        """Ids of the newest jobs, the newest first."""
        answer = await self.images.ListJobs(image_pb2.ListJobsRequest(), timeout=_CALL_S)
        return [job.job_id for job in answer.jobs]

    async def stop_early(self) -> None:
        """Ends as at SIGTERM: what runs then is for a later life."""
        await self.gateway.server.drain(self.gateway.finish)

    async def is_serving(self) -> bool:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(), timeout=_CALL_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until_serving(self, serving: bool = True) -> None:
        """Returns when its health says so."""

        async def says_so() -> bool:
            return await self.is_serving() is serving

        await eventually(says_so)

    async def until_checkpoint(self, worker: ScriptedWorker, job_id: str, *, steps: int = 15) -> None:
        """Return when the gateway has the checkpoint after so many steps that the worker has of a first attempt."""
        attempt = worker_pb2.AttemptId(job_id=job_id, number=1)
        data = str(steps).encode()
        await worker.checkpoints.put(
            worker_pb2.WatchCheckpointsResponse(attempt=attempt, steps_done=steps, checkpoint=data)
        )

        def has_it() -> bool:
            job = self.gateway._jobs.find_live(job_id)
            return job is not None and job.checkpoint is not None and job.checkpoint.data == data

        await eventually(has_it)


@contextlib.asynccontextmanager
async def running_gateway(*, codec_processes: int = 0, starting: bool = False, **config: Any) -> AsyncIterator[Running]:
    """Serves until the block ends. Most tests send no images and need no codec process.

    state: of an earlier one that shall go on; else it has one of its own. starting: the block begins when it listens,
    which is before it serves. tls: its files; channels: what its callers here open theirs with.
    """
    with contextlib.ExitStack() as stack:
        config.setdefault("state", stack.enter_context(tempfile.TemporaryDirectory(prefix="bottega-test-")))
        async with _serving(codec_processes=codec_processes, starting=starting, **config) as running:
            yield running


@contextlib.asynccontextmanager
async def _serving(*, codec_processes: int, starting: bool, **config: Any) -> AsyncIterator[Running]:
    server = GatewayServerConfig(
        listen=config.pop("listen", "127.0.0.1:0"),
        metrics_listen="127.0.0.1:0",
        drain_grace_s=config.pop("drain_grace_s", 5.0),
        default_deadline_s=config.pop("default_deadline_s", 600.0),
        max_streams=config.pop("max_streams", 2048),
        tls=config.pop("tls", TlsConfig()),
        client_certificates=config.pop("client_certificates", True),
    )
    channels: Channels = config.pop("channels", PLAINTEXT)
    fleet_config = FleetConfig(**{"listen": "127.0.0.1:0"} | config.pop("fleet", {}))
    gateway = Gateway(GatewayConfig(server=server, fleet=fleet_config, codec_processes=codec_processes, **config))
    await gateway.server.start()
    start = asyncio.create_task(_start(gateway))
    if not starting:
        try:
            await start
        except BaseException:
            await gateway.server.stop()
            await gateway.shut_down()
            raise
    channel = channels.open(Target(address=gateway.server.address, role=Role.GATEWAY))
    images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
    to_fleet = channels.open(Target(address=gateway.fleet_listener.address, role=Role.GATEWAY))
    fleet: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(to_fleet)
    running = Running(gateway=gateway, channel=channel, images=images, fleet=fleet, fleet_channel=to_fleet)
    try:
        yield running
    finally:
        for worker in running.workers:
            await worker.die()
        for host in running.servers:
            await host.die()
        await channel.close()
        await to_fleet.close()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await gateway.server.stop()
        await gateway.shut_down()


async def _start(gateway: Gateway) -> None:
    await gateway.warm_up()
    await gateway.server.set_serving(True)


async def refusal(call: Callable[[], Any], kind: type[BottegaError] = BottegaError) -> BottegaError:
    """The error of that kind with which a call ends; fails when it does not."""
    try:
        answer = call()
        if hasattr(answer, "__aiter__"):
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error)
        assert isinstance(typed, kind), repr(typed)
        return typed
    raise AssertionError("the call was not refused")


async def told(call: Any) -> image_pb2.JobEvent:
    """The next event of Generate or WatchJob."""
    event: image_pb2.JobEvent = (await anext(aiter(call))).event
    return event
