"""Offers of links whose answers are there at once, where a worker's front would bring them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import grpc

from bottega.errors import BottegaError, PeerDead
from bottega.rpc.channel import channel_options
from bottega.rpc.status import from_rpc_error
from bottega.transport import Offer, ServiceOffer, offer_from_wire
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.link_pb2 import OpenLinkRequest
from bottega.v1.link_pb2_grpc import LinkServiceStub

_ANSWER_S = 10.0


class OffersAtOnce(ABC):
    """An OfferSource. asked: address and link_id of every request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    @abstractmethod
    def answer(self, address: str, link_id: str) -> ServiceOffer:
        """The offer, or the BottegaError that the request ends with."""

    def request(
        self, kind: str, address: str, link_id: str, terms: Mapping[str, str] | None = None
    ) -> Future[ServiceOffer]:
        self.asked.append((address, link_id))
        answered = Future[ServiceOffer]()
        try:
            answered.set_result(self.answer(address, link_id))
        except BottegaError as error:
            answered.set_exception(error)
        return answered


def ask_offer(address: str, kind: str, *, worker: str = "w", link_id: str = "") -> ServiceOffer:
    """Ask the service of that kind for a link. Raises the BottegaError with which it refuses."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        stub: LinkServiceStub = LinkServiceStub(channel)
        try:
            answer = stub.OpenLink(OpenLinkRequest(kind=kind, worker=worker, link_id=link_id), timeout=_ANSWER_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return ServiceOffer(offer=offer_from_wire(answer.offer), service=answer.service)


class AskedOffers(OffersAtOnce):
    """Offers for which the services themselves are asked, all of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        return ask_offer(address, self._kind, link_id=link_id)


class NamedServer(Protocol):
    """A server of links in this process, which has a name."""

    name: str

    def offer(self, worker: str, link_id: str, *, caller: str) -> Offer:
        """Return an offer of a link."""

    def close(self) -> None:
        """End the server and its links."""


class LocalOffers(OffersAtOnce):
    """Offers of servers in this process, each at its name in place of an address. there: those that are not away."""

    def __init__(self, *servers: NamedServer) -> None:
        super().__init__()
        self.there = {server.name: server for server in servers}

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        if address not in self.there:
            raise PeerDead(f"{address} is away")
        return ServiceOffer(offer=self.there[address].offer("w", link_id, caller=""), service=address)

    def addresses(self) -> Sequence[ServiceAddress]:
        return [ServiceAddress(name=name, address=name) for name in self.there]
