"""Where the engine asks for links to other services, and the answers come in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from bottega.errors import InvalidRequest
from bottega.rpc.status import from_job_error
from bottega.transport import ServiceOffer, offer_from_wire
from bottega.v1.engine_pb2 import EngineLinkOffer, EngineLinkRequest
from bottega.v1.worker_pb2 import PeerTerms


class LinkRequests:
    """An OfferSource. Any thread may ask; one hears the answers. send: tells the front."""

    def __init__(self, send: Callable[[EngineLinkRequest], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[ServiceOffer]] = {}

    def request(
        self, kind: str, address: str, link_id: str, terms: Mapping[str, str] | None = None
    ) -> Future[ServiceOffer]:
        """See OfferSource."""
        request = EngineLinkRequest(
            request=next(self._numbers),
            address=address,
            link_id=link_id,
            lora_store=kind == "lora",
            peer=PeerTerms(**terms) if terms is not None else None,
        )
        asked = self._asked[request.request] = Future[ServiceOffer]()
        self._send(request)
        return asked

    def answer(self, message: EngineLinkOffer) -> None:
        """The front's answer; it always comes, with an error at the latest when the service says nothing."""
        asked = self._asked.pop(message.request, None)
        if asked is None:
            return
        if message.HasField("error"):
            asked.set_exception(from_job_error(message.error))
            return
        try:
            asked.set_result(ServiceOffer(offer=offer_from_wire(message.offer), service=message.worker))
        except InvalidRequest as error:
            asked.set_exception(error)
