"""ControlNet servers and workers as real processes without a gateway: for tests of what they do to each other."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from PIL import Image
from torch import Tensor

from bottega import kinds
from bottega.rpc.status import from_job_error
from bottega.v1 import (
    controlnet_pb2,
    controlnet_pb2_grpc,
    generation_pb2,
    hosted_pb2,
    link_pb2,
    link_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.samples.hostile_images import saved
from tests.support.addon_messages import placed
from tests.support.services import SMALL_ENGINE, Service, Services, worker_config
from tests.support.stock import Pixels

SERVER = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "drain_grace_s": 5.0}
# A picture takes a second; a server that dies on the way costs some more, and the machine may be busy.
DRAW_S = 60.0
# The first one that is added waits for a process that looks at it, which imports torch.
ADD_S = 60.0


class ControlNetServer:
    """A ControlNet server's process."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name
        self._channel = grpc.insecure_channel(service.address)
        self._stub: controlnet_pb2_grpc.ControlNetServiceStub = controlnet_pb2_grpc.ControlNetServiceStub(self._channel)

    @property
    def engine_pid(self) -> int:
        return [int(event["pid"]) for event in self.service.events() if event["event"] == "engine ready"][-1]

    def hosted(self) -> dict[str, hosted_pb2.Hosted]:
        response = self._stub.ListControlNets(controlnet_pb2.ListControlNetsRequest(), timeout=5)
        return {net.name: net for net in response.controlnets}

    def add(self, name: str, folder: str) -> hosted_pb2.Hosted:
        request = controlnet_pb2.AddControlNetRequest(name=name, folder=folder)
        return self._stub.AddControlNet(request, timeout=ADD_S).controlnet

    def prefetch(self, *names: str) -> list[str]:
        return list(self._stub.Prefetch(controlnet_pb2.PrefetchRequest(names=names), timeout=5).accepted)

    def evict(self, *names: str) -> None:
        self._stub.Prefetch(controlnet_pb2.PrefetchRequest(unneeded=names), timeout=5)

    def pin(self, name: str, *, pinned: bool = True) -> hosted_pb2.Hosted:
        request = controlnet_pb2.PinControlNetRequest(name=name, pinned=pinned)
        return self._stub.PinControlNet(request, timeout=5).controlnet

    def open_link(self, worker: str, link_id: str = "") -> link_pb2.OpenLinkResponse:
        stub: link_pb2_grpc.LinkServiceStub = link_pb2_grpc.LinkServiceStub(self._channel)
        request = link_pb2.OpenLinkRequest(kind=kinds.CONTROLNET, worker=worker, link_id=link_id)
        return stub.OpenLink(request, timeout=5)

    def signal_engine(self, number: signal.Signals) -> None:
        """SIGKILL ends it as a crash does; SIGSTOP freezes it."""
        os.kill(self.engine_pid, number)


@dataclass(slots=True, kw_only=True, eq=False)
class Drawn:
    """What came of an attempt."""

    pixels: Pixels | None = None
    provenance: generation_pb2.Provenance = field(default_factory=generation_pb2.Provenance)
    error: Exception | None = None
    steps: list[int] = field(default_factory=list)

    @property
    def picture(self) -> Pixels:
        """The picture; raises why there is none."""
        if self.error is not None:
            raise self.error
        assert self.pixels is not None
        return self.pixels

    def servers(self, place: int = 0) -> list[str]:
        """Who ran one of its ControlNets."""
        return list(self.provenance.controlnets[place].servers)


class Worker:
    """A worker's process."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name
        self._channel = grpc.insecure_channel(service.address)
        self._stub: worker_pb2_grpc.WorkerServiceStub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._jobs = 0

    def draw(
        self,
        spec: generation_pb2.GenerationSpec,
        hosts: Sequence[controlnet_pb2.ControlNetHosts],
        *,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> Drawn:
        """One attempt from its beginning to its end. on_step: told the steps that are done, as they are reported."""
        self._jobs += 1
        attempt = worker_pb2.AttemptId(job_id=f"{threading.get_ident()}-{self._jobs}", number=1)
        request = worker_pb2.RunAttemptRequest(attempt=attempt, spec=spec, addons=placed(hosts))
        drawn, data = Drawn(), b""
        for event in self._stub.RunAttempt(request, timeout=DRAW_S):
            match event.WhichOneof("event"):
                case "progress":
                    drawn.steps.append(event.progress.steps_done)
                    on_step(event.progress.steps_done)
                case "image":
                    data += event.image.chunk
                case "completed":
                    drawn.provenance = event.completed.provenance
                    with Image.open(io.BytesIO(data)) as picture:
                        drawn.pixels = np.asarray(picture.convert("RGB"))
                case "failed":
                    drawn.error = from_job_error(event.failed)
        return drawn


class House:
    """Starts ControlNet servers and workers. nets: folders by name, which every server hosts."""

    def __init__(self, services: Services, folder: Path, nets: Mapping[str, Path]) -> None:
        self._services = services
        self._folder = folder
        self.nets = {name: str(path) for name, path in nets.items()}

    def server(self, name: str, *, engine: Mapping[str, object] | None = None, **overrides: object) -> ControlNetServer:
        config = {
            "name": name,
            "gateway": "",
            "server": SERVER,
            "engine": {"threads": 1, **(engine or {})},
            "controlnets": self.nets,
            "catalogue": str(self._folder / f"{name}.db"),
            **overrides,
        }
        return ControlNetServer(self._services.start("controlnet", config, name=name), name)

    def worker(self, name: str, **engine: object) -> Worker:
        config = worker_config("", name=name, engine={**SMALL_ENGINE, "controlnets": {"silence_s": 1.5}, **engine})
        return Worker(self._services.start("worker", config, name=name), name)


def controlled(*controls: tuple[str, Tensor, float], **options: object) -> generation_pb2.GenerationSpec:
    """A spec with these ControlNets: name, image and scale; every default filled in."""
    said: dict[str, object] = {"prompt": "a big red star on the left on a blue background", "guidance_scale": 4.0}
    said |= {"model": "miniature", "num_inference_steps": 8, "width": 64, "height": 64, "seed": 7, "num_images": 1}
    nets = [
        generation_pb2.ControlNet(name=name, image=png(image), controlnet_conditioning_scale=scale)
        for name, image, scale in controls
    ]
    return generation_pb2.GenerationSpec(**(said | options), controlnets=nets)  # type: ignore[arg-type]


def hosts(spec: generation_pb2.GenerationSpec, *servers: ControlNetServer) -> list[controlnet_pb2.ControlNetHosts]:
    """What an attempt is told: all of the spec's ControlNets are on these servers, the best first."""
    said = [controlnet_pb2.ControlNetServer(name=each.name, address=each.service.address) for each in servers]
    digests = _digests(servers)
    return [controlnet_pb2.ControlNetHosts(digest=digests.get(net.name, ""), servers=said) for net in spec.controlnets]


def png(image: Tensor) -> bytes:
    """uint8 [height, width, 3], encoded."""
    return saved(Image.fromarray(image.numpy()))


def _digests(servers: Sequence[ControlNetServer]) -> dict[str, str]:
    """Of the first server that hosts anything now."""
    hosted: Iterator[dict[str, hosted_pb2.Hosted]] = (each.hosted() for each in servers)
    return {name: net.digest for name, net in next((nets for nets in hosted if nets), {}).items()}
