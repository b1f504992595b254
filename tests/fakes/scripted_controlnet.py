"""A ControlNet server that speaks the real wire protocol and computes nothing: it hosts what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from bottega import kinds
from bottega.errors import BottegaError
from bottega.rpc.fleet_membership import FleetMembership
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.rpc.status import to_grpc_status
from bottega.v1 import controlnet_pb2, controlnet_pb2_grpc, fleet_pb2, hosted_pb2
from bottega.v1.hosted_pb2 import Hosted
from tests.fakes.scripted_worker import MODEL
from tests.support.waiting import EVENTUALLY_S

ON_DISK = hosted_pb2.HOSTED_STATE_ON_DISK
LOADED = hosted_pb2.HOSTED_STATE_LOADED


def hosted(name: str, **facts: Any) -> Hosted:
    """A ControlNet for the scripted workers' model, loaded."""
    defaults = {"digest": f"hash of {name}", "base": MODEL.base, "size_bytes": 1 << 20, "state": LOADED}
    return Hosted(kind=kinds.CONTROLNET, name=name, **{**defaults, **facts})


class ScriptedControlNetServer(controlnet_pb2_grpc.ControlNetServiceServicer):
    """One server. `start` joins the gateway's fleet; `die` cuts everything at once.

    prefetched: names, request by request; each is loaded once that is answered, which is when `answers` is set.
    broken: why names cannot be loaded. budget_bytes: memory for ControlNets; 0 is not said.
    load_s: seconds of a load; 0 loads before the answer.
    added: what was to be hosted, by name and folder; failure: what that is answered with instead.
    """

    def __init__(self, name: str, gateway: str, nets: Sequence[Hosted]) -> None:
        self.name = name
        self.nets = {net.name: net for net in nets}
        self.prefetched: list[list[str]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.added: list[tuple[str, str]] = []
        self.root = self.catalogue = ""
        self.failure: BottegaError | None = None
        self.draining = False
        self.broken: dict[str, str] = {}
        self.budget_bytes = 0
        self.load_s = 0.0
        self._gateway = gateway
        self._server = Server(name, ServerConfig(drain_grace_s=0.1))
        self.membership: FleetMembership | None = None

    async def start(self, *, join_timeout_s: float = EVENTUALLY_S) -> ScriptedControlNetServer:
        """Listens and joins. Raises TimeoutError when it is not let in by then; it keeps trying."""
        controlnet_pb2_grpc.add_ControlNetServiceServicer_to_server(self, self._server.grpc)
        await self._server.start()
        registration = fleet_pb2.Registration(
            kind=kinds.CONTROLNET, name=self.name, address=self.address, version="test", device="cpu"
        )
        self.membership = FleetMembership(self._gateway, registration, load=self.load)
        self.membership.start()
        await asyncio.wait_for(self.membership.joined.wait(), join_timeout_s)
        return self

    @property
    def address(self) -> str:
        """host:port of its own server."""
        return self._server.address

    def load(self) -> fleet_pb2.Load:
        return fleet_pb2.Load(hosted=self.nets.values(), draining=self.draining, budget_bytes=self.budget_bytes)

    async def die(self) -> None:
        """Everything of it ends at once, as when its process is killed."""
        await self._server.grpc.stop(0)
        if self.membership is not None:
            await self.membership.stop()
        await self._server.stop()

    async def Prefetch(
        self, request: controlnet_pb2.PrefetchRequest, context: object
    ) -> controlnet_pb2.PrefetchResponse:
        self.prefetched.append(list(request.names))
        await self.answers.wait()
        accepted = [name for name in request.names if name in self.nets]
        if self.load_s:
            asyncio.get_running_loop().call_later(self.load_s, self._load_all, accepted)
        else:
            self._load_all(accepted)
        return controlnet_pb2.PrefetchResponse(accepted=accepted)

    def _load_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.nets[name].state = ON_DISK if name in self.broken else LOADED
            self.nets[name].load_error = self.broken.get(name, "")
            self.nets[name].failed_loads += name in self.broken
        self._report()

    def _report(self) -> None:
        if self.membership is not None:
            self.membership.report_soon()

    async def _fail(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self.failure is not None:
            await context.abort_with_status(to_grpc_status(self.failure))

    async def ListControlNets(
        self, request: controlnet_pb2.ListControlNetsRequest, context: object
    ) -> controlnet_pb2.ListControlNetsResponse:
        nets = [self.nets[name] for name in sorted(self.nets)]
        return controlnet_pb2.ListControlNetsResponse(
            controlnets=nets, budget_bytes=1 << 30, root=self.root, catalogue=self.catalogue
        )

    async def AddControlNet(
        self, request: controlnet_pb2.AddControlNetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> controlnet_pb2.AddControlNetResponse:
        await self._fail(context)
        self.added.append((request.name, request.folder))
        net = self.nets[request.name] = hosted(request.name, state=ON_DISK)
        self._report()
        return controlnet_pb2.AddControlNetResponse(controlnet=net)

    async def PinControlNet(
        self, request: controlnet_pb2.PinControlNetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> controlnet_pb2.PinControlNetResponse:
        await self._fail(context)
        net = self.nets[request.name]
        net.pinned = request.pinned
        self._report()
        return controlnet_pb2.PinControlNetResponse(controlnet=net)

    async def SetProfile(
        self, request: controlnet_pb2.SetProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> controlnet_pb2.SetProfileResponse:
        await self._fail(context)
        net = self.nets[request.name]
        net.profiles.append(request.profile)
        self._report()
        return controlnet_pb2.SetProfileResponse(controlnet=net)
