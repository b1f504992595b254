"""A gateway in a process of its own, for tests that kill, freeze and start it again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.support.services import Service, Services, gateway_config

# Far more than a call takes, also one that waits for the next scheduler.
_CALL_S = 60.0


class GatewayProcess:
    """A gateway that starts again at the same addresses with the same state, and a client of it."""

    def __init__(self, services: Services, folder: Path, *, name: str = "gateway", **config: Any) -> None:
        self.name = name
        self.state = folder / name
        self.address = self.fleet = "127.0.0.1:0"
        self.service: Service | None = None
        self._services = services
        self._config = {"name": name, "state": str(self.state), **config}

    @property
    def process(self) -> Any:
        assert self.service is not None
        return self.service.process

    async def start(self) -> None:
        server = {"listen": self.address, "metrics_listen": "127.0.0.1:0"}
        config = gateway_config(server=server, fleet={"listen": self.fleet}, **self._config)
        self.service = await asyncio.to_thread(self._services.start, "gateway", config, name=self.name)
        if self.address != self.service.address:
            self.address, self.fleet = self.service.address, self.service.fleet
            self._channel = open_channel(self.address)
            self.images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(self._channel)

    async def stop(self) -> int:
        assert self.service is not None
        return await asyncio.to_thread(self.service.stop)

    async def kill(self) -> None:
        assert self.service is not None
        self.process.kill()  # now, and not when a thread is free
        await asyncio.to_thread(self.service.kill)

    async def close(self) -> None:
        """Close the client."""
        if self.service is not None:
            await self._channel.close()

    def logged(self, event: str) -> int:
        """How often it has logged this, in the life that the log is of."""
        assert self.service is not None
        return sum(line.get("event") == event for line in self.service.events())

    async def submit(self, request_id: str = "", *, webhook: image_pb2.Webhook | None = None, **spec: Any) -> str:
        asked = GenerationSpec(**{"prompt": "a star", **spec})
        request = image_pb2.SubmitJobRequest(request_id=request_id, spec=asked, webhook=webhook)
        return (await self.images.SubmitJob(request, timeout=_CALL_S)).job.job_id

    async def job(self, job_id: str) -> image_pb2.Job:
        request = image_pb2.GetJobRequest(job_id=job_id)
        return (await self.images.GetJob(request, timeout=_CALL_S, wait_for_ready=True)).job

    async def is_running(self, job_id: str) -> bool:
        return (await self.job(job_id)).state == image_pb2.JOB_STATE_RUNNING

    async def listed(self) -> list[str]:
        """Ids of the newest jobs, the newest first."""
        answer = await self.images.ListJobs(image_pb2.ListJobsRequest(), timeout=_CALL_S)
        return [job.job_id for job in answer.jobs]

    async def ended(self, job_id: str) -> image_pb2.Job:
        """Watches a job here to its end; the job then."""
        request = image_pb2.WatchJobRequest(job_id=job_id)
        async for _ in self.images.WatchJob(request, timeout=_CALL_S, wait_for_ready=True):
            pass
        return await self.job(job_id)

    async def knows_a_model(self) -> bool:
        """Whether a worker has joined. Before, it is not certain what a request would be drawn with."""
        return bool((await self.images.ListModels(image_pb2.ListModelsRequest(), timeout=_CALL_S)).models)
