"""Starts a store of colours: `python -m tests.added_service --config FILE`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc
from pydantic import ConfigDict

from bottega.errors import BottegaError
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.fleet_membership import FleetMembership
from bottega.rpc.link_service import add_link_service, link_endpoints
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.strict import STRICT
from bottega.transport import (
    Connection,
    Incoming,
    Limits,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    kind_of,
    number_message,
    offer_to_wire,
    read_number,
)
from bottega.v1 import fleet_pb2
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, HOSTED_STATE_ON_DISK, Hosted
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest
from tests.added_service.calls import ANSWER, ASK, COLOURS, SERVICE, messages
from tests.added_service.service_spec import KIND


@dataclass(frozen=True, slots=True, kw_only=True)
class ColourConfig:
    """What a store of colours may be told."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    gateway: str
    server: ServerConfig = field(default_factory=ServerConfig)


class ColourLink(LinkHandler):
    """Answers one worker that asks for colours by number."""

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        with incoming:
            number = read_number(incoming.layout, connection.wait_all(incoming))
            if kind_of(incoming.layout) != ASK or not 0 <= number < len(COLOURS):
                raise ValueError("a worker asks for a colour that there is")
        connection.send(number_message(ANSWER, list(COLOURS.values())[number]))

    def on_end(self, cause: BottegaError) -> None:
        """Nothing is kept for a worker."""


class ColourLinks(LinkServer[ColourLink]):
    """The links of the store."""

    def new_handler(self, connection: Connection) -> ColourLink:
        return ColourLink()


class ColourStore:
    """The store. server: whose calls it answers."""

    def __init__(self, config: ColourConfig, server: Server) -> None:
        self.name = config.name
        self._config = config
        self._server = server
        self._loaded: set[str] = set()
        self._links = ColourLinks(
            link_endpoints("127.0.0.1:0", None),
            service="the store of colours",
            settings=LinkServerSettings(limits=Limits(slots=4, slot_bytes=4096)),
        )
        self._membership: FleetMembership | None = None

    async def start(self) -> None:
        registration = fleet_pb2.Registration(
            kind=KIND,
            name=self.name,
            address=self._server.address,
            metrics_address=self._server.metrics_address,
        )
        self._membership = FleetMembership(self._config.gateway, registration, load=self.load)
        self._membership.start()

    async def stop(self) -> None:
        """Leaves the fleet and ends the links."""
        if self._membership:
            await self._membership.stop()
        await asyncio.to_thread(self._links.close)

    def load(self) -> fleet_pb2.Load:
        """Which colours it has, and which of them in memory."""
        states = {name: HOSTED_STATE_LOADED if name in self._loaded else HOSTED_STATE_ON_DISK for name in COLOURS}
        return fleet_pb2.Load(hosted=[Hosted(kind=KIND, name=name, state=state) for name, state in states.items()])

    async def prefetch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        self._loaded |= COLOURS.keys() & set(request.names)
        if self._membership:
            self._membership.report_soon()
        return messages.PrefetchResponse(accepted=request.names)

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """A link's offer for a worker."""
        return offer_to_wire(self._links.offer(request.worker, request.link_id, caller=caller))


@contextlib.asynccontextmanager
async def _hooks(config: ColourConfig) -> AsyncIterator[ServiceHooks]:
    server = Server(KIND, config.server)
    store = ColourStore(config, server)
    prefetch = grpc.unary_unary_rpc_method_handler(
        store.prefetch,
        request_deserializer=messages.PrefetchRequest.FromString,
        response_serializer=messages.PrefetchResponse.SerializeToString,
    )
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Prefetch": prefetch}),))
    add_link_service(server, KIND, store)
    yield ServiceHooks(server=server, warm_up=store.start, shut_down=store.stop)


if __name__ == "__main__":
    sys.exit(boot(KIND, ColourConfig, _hooks, description="A store of colours"))
