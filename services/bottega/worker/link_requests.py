"""Where the engine asks for links to other services, and the answers come in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from bottega.errors import InvalidRequest
from bottega.rpc.status import from_job_error
from bottega.transport import ServiceOffer, offer_from_wire
from bottega.v1.link_pb2 import LinkResult, LinkTerm, OpenLinkRequest, OutgoingLinkRequest


class LinkRequests:
    """An OfferSource. Any thread may request; one thread handles the answers. send: sends to the front."""

    def __init__(self, send: Callable[[OutgoingLinkRequest], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[ServiceOffer]] = {}

    def request(
        self, kind: str, address: str, link_id: str, terms: Mapping[str, str] | None = None
    ) -> Future[ServiceOffer]:
        named = [LinkTerm(name=name, value=value) for name, value in (terms or {}).items()]
        request = OutgoingLinkRequest(
            request=next(self._numbers),
            address=address,
            open=OpenLinkRequest(kind=kind, link_id=link_id, terms=named),
        )
        asked = self._asked[request.request] = Future[ServiceOffer]()
        self._send(request)
        return asked

    def answer(self, message: LinkResult) -> None:
        """The front's answer; it always comes, with an error at the latest when the service says nothing."""
        asked = self._asked.pop(message.request, None)
        if asked is None:
            return
        if message.HasField("error"):
            asked.set_exception(from_job_error(message.error))
            return
        try:
            asked.set_result(ServiceOffer(offer=offer_from_wire(message.opened.offer), service=message.opened.service))
        except InvalidRequest as error:
            asked.set_exception(error)
