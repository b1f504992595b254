"""Two real workers that are a pair, without a gateway: started, asked for pictures, killed and started again."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import PIL.Image
import psutil

from bottega.client.suite.plan import free_ports
from bottega.rpc.channel import channel_options
from bottega.v1 import generation_pb2, worker_pb2, worker_pb2_grpc
from tests.support.services import Service, Services, worker_config
from tests.support.stock import Pixels
from tests.support.waiting import wait_until

TIMEOUT_S = 60.0
OPTIONS: Mapping[str, Any] = {
    "model": "miniature",
    "prompt": "a big red star on the left on a blue background",
    "num_inference_steps": 12,
    "guidance_scale": 4.0,
    "width": 64,
    "height": 64,
    "seed": 11,
    "num_images": 1,
    "sampler": generation_pb2.SAMPLER_EULER_ANCESTRAL,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """A finished attempt. pixels: uint8 [height, width, 3]."""

    pixels: Pixels
    provenance: generation_pb2.Provenance

    @property
    def lent_steps(self) -> int:
        """Steps that had rows computed by the other one."""
        return self.provenance.pair.steps

    @property
    def taken_back_steps(self) -> int:
        """Steps whose rows the other one did not bring."""
        return self.provenance.pair.taken_back_steps

    def seconds(self, stage: str) -> float:
        return sum(time.seconds for time in self.provenance.times if time.stage == stage)


class WorkerPair:
    """The workers "a" and "b". engine: settings of both. cores: one for each, where they are pinned.

    gateway: of the fleet that they join; empty is none.
    """

    def __init__(
        self, folder: Path, engine: Mapping[str, object], *, cores: Sequence[int] = (), gateway: str = ""
    ) -> None:
        self._gateway = gateway
        self._services = Services(folder)
        self._engine = dict(engine)
        self._ports = dict(zip("ab", free_ports(2), strict=True))
        self._cores = dict(zip("ab", cores, strict=False))
        self._running: dict[str, Service] = {}
        self._jobs = itertools.count(1)
        self._lives = itertools.count(1)
        self._threads = ThreadPoolExecutor(4)

    def __enter__(self) -> WorkerPair:
        try:
            for starting in [self._threads.submit(self.start, name) for name in "ab"]:
                starting.result()
            for name in "ab":
                self.wait_for_link(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._services.stop()

    def start(self, name: str) -> Service:
        """Starts one of them, where it was before; returns when it serves."""
        other = "b" if name == "a" else "a"
        engine = {**self._engine, "peer": {"address": f"127.0.0.1:{self._ports[other]}"}}
        config = worker_config(self._gateway, name=name, engine=engine)
        config["server"] = {"listen": f"127.0.0.1:{self._ports[name]}", "metrics_listen": "127.0.0.1:0"}
        service = self._services.start("worker", config, name=f"{name}-{next(self._lives)}")
        self._running[name] = service
        if name in self._cores:
            for process in (worker := psutil.Process(service.process.pid), *worker.children(recursive=True)):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {self._cores[name]})
        return service

    def worker(self, name: str) -> Service:
        """A worker's newest life."""
        return self._running[name]

    def engine_of(self, name: str) -> psutil.Process:
        """The engine process of a worker."""
        front = psutil.Process(self.worker(name).process.pid)
        (engine,) = [child for child in front.children() if "bottega.worker.engine.main" in child.cmdline()]
        return engine

    def links(self, name: str) -> int:
        """How often a worker's newest life has been linked to the other one as its leader."""
        return sum(line.get("event") == "linked to the peer" for line in self.worker(name).events())

    def wait_for_link(self, name: str, more_than: int = 0) -> None:
        """Waits until `name` leads the other one, for the next time after so many."""
        wait_until(lambda: self.links(name) > more_than, f"{name} to be linked to its peer")

    def draw(self, name: str, **options: Any) -> Drawn:
        """A picture, drawn by one of them."""
        spec = generation_pb2.GenerationSpec(**{**OPTIONS, **options})
        attempt = worker_pb2.AttemptId(job_id=f"job-{next(self._jobs)}", number=1)
        with grpc.insecure_channel(self.worker(name).address, options=channel_options()) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            request = worker_pb2.RunAttemptRequest(attempt=attempt, spec=spec)
            events = list(stub.RunAttempt(request, timeout=TIMEOUT_S))
        assert events[-1].WhichOneof("event") == "completed", events[-1]
        data = b"".join(event.image.chunk for event in events if event.HasField("image"))
        pixels = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
        return Drawn(pixels=pixels, provenance=events[-1].completed.provenance)

    def begin(self, name: str, **options: Any) -> Future[Drawn]:
        """The same, while other things go on."""
        return self._threads.submit(self.draw, name, **options)

    def alone(self, name: str, **options: Any) -> Drawn:
        """The same, by one of them without the other."""
        return self.draw(name, techniques=generation_pb2.Techniques(latent_parallelism=False), **options)
