"""LinkService, through which workers open tensor links to a service, and the messages about links to its engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from bottega.errors import BottegaError, Forbidden, InvalidRequest, Violation
from bottega.rpc.address import host_of, split
from bottega.rpc.security.caller import Role, caller
from bottega.rpc.server import Server
from bottega.rpc.server_config import LinksConfig
from bottega.rpc.status import to_job_error
from bottega.transport import (
    Endpoints,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    TcpEndpoint,
    default_socket_path,
    offer_to_wire,
)
from bottega.v1 import link_pb2, link_pb2_grpc
from bottega.v1.link_pb2 import IncomingLinkRequest, LinkOffer, LinkResult, OpenLinkRequest, OpenLinkResponse

HandlerT = TypeVar("HandlerT", bound=LinkHandler)

# Limits of the contract.
_MAX_CHARACTERS = 128
_MAX_TERMS = 16

_SERVICE_NAME = link_pb2.DESCRIPTOR.services_by_name["LinkService"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]


class LinkOpener(Protocol):
    """A service to which workers open tensor links."""

    name: str
    """Name of the service in the fleet."""

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Return an offer of a link. Raises BottegaError if the service offers none.

        Args:
            caller: Host of the worker.
        """
        ...


def add_link_service(server: Server, kind: str, opener: LinkOpener) -> None:
    """Add LinkService, with reflection and health, to the server of a service of this kind."""
    link_pb2_grpc.add_LinkServiceServicer_to_server(LinkService(kind, opener), server.grpc)
    server.add_services([_SERVICE_NAME])


class LinkService(link_pb2_grpc.LinkServiceServicer):
    """The servicer of bottega.v1.LinkService."""

    def __init__(self, kind: str, opener: LinkOpener) -> None:
        self._kind = kind
        self._opener = opener

    async def OpenLink(self, request: OpenLinkRequest, context: _Context) -> OpenLinkResponse:
        """Return an offer of a link to a worker."""
        violations = list(self._check(request))
        if violations:
            text = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
            raise InvalidRequest(text, violations=violations)
        known = caller()
        if known.role is not Role.LOCAL and known.name != request.worker:
            raise Forbidden(f"the certificate is that of {known.role}/{known.name}, not of worker {request.worker}")
        offer = await self._opener.open_link(request, caller=host_of(context.peer()))
        return OpenLinkResponse(offer=offer, service=self._opener.name)

    def _check(self, request: OpenLinkRequest) -> Iterator[Violation]:
        """Yield violations in a request, except for its link_id, which the listener of links checks."""
        if request.kind != self._kind:
            yield Violation(field="kind", description=f"this is a service of kind {self._kind}")
        if not 0 < len(request.worker) <= _MAX_CHARACTERS:
            yield Violation(field="worker", description=f"must be 1 to {_MAX_CHARACTERS} characters")
        if len(request.terms) > _MAX_TERMS:
            yield Violation(field="terms", description=f"must have at most {_MAX_TERMS} entries")
        for index, term in enumerate(request.terms[:_MAX_TERMS]):
            for field, text in (("name", term.name), ("value", term.value)):
                if not 0 < len(text) <= _MAX_CHARACTERS:
                    description = f"must be 1 to {_MAX_CHARACTERS} characters"
                    yield Violation(field=f"terms[{index}].{field}", description=description)


def answer_link_request(links: LinkServer[Any], request: IncomingLinkRequest) -> LinkResult:
    """Return the engine's answer to a request for an offer from its own service."""
    result = LinkResult(request=request.request)
    try:
        offer = links.offer(request.open.worker, request.open.link_id, caller=request.caller)
        result.opened.offer.CopyFrom(offer_to_wire(offer))
    except BottegaError as error:
        result.error.CopyFrom(to_job_error(error))
    return result


def link_endpoints(listen: str | None, socket: str | Path | None, *, seal: bool = True) -> Endpoints:
    """Return the addresses on which links are accepted. Raises ConfigError.

    Args:
        listen: host:port; None or "" for none.
        socket: Path of a unix socket; None or "" for none.
        seal: Whether traffic over host:port is encrypted.
    """
    return Endpoints(tcp=split(listen) if listen else None, unix_path=Path(socket) if socket else None, seal=seal)


def tcp_endpoint(address: str) -> TcpEndpoint | None:
    """Parse the host:port to advertise; None for "". Raises ConfigError."""
    if not address:
        return None
    host, port = split(address)
    return TcpEndpoint(host=host, port=port)


class StoreLinks(LinkServer[HandlerT]):
    """The server of a service's links to all workers. Raises ConfigError if an address cannot be bound.

    Args:
        kind: The service's kind, which names its unix socket.
        what: Name of the service in texts, such as "the activation store".
    """

    def __init__(self, config: LinksConfig, *, kind: str, what: str, settings: LinkServerSettings) -> None:
        socket: str | Path | None = default_socket_path(kind) if config.socket == "" else config.socket
        super().__init__(
            link_endpoints(config.listen, socket, seal=config.seal),
            service=what,
            settings=settings,
            advertised=tcp_endpoint(config.advertised),
        )
