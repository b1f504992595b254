"""Where the engine asks for links to ControlNet servers, LoRA stores and its peer, and the answers come in.

Knows no link.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

from bottega.errors import InvalidRequest
from bottega.rpc.status import from_job_error
from bottega.transport import Offer, offer_from_wire
from bottega.v1.engine_pb2 import EngineLinkOffer, EngineLinkRequest
from bottega.v1.worker_pb2 import PeerTerms
from bottega.worker.peer.leader import PeerOffer


class LinkRequests:
    """Any thread may ask; one hears the answers. say: tells the front. terms: what a peer must agree to."""

    def __init__(self, say: Callable[[EngineLinkRequest], None]) -> None:
        self.terms = PeerTerms()
        self._say = say
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[PeerOffer]] = {}

    def ask(self, address: str, link_id: str) -> Future[Offer]:
        """See Offers."""
        return self._ask_server(EngineLinkRequest(address=address, link_id=link_id))

    def ask_loras(self, address: str, link_id: str) -> Future[Offer]:
        """See LoraOffers."""
        return self._ask_server(EngineLinkRequest(address=address, link_id=link_id, lora_store=True))

    def ask_peer(self, address: str, link_id: str) -> Future[PeerOffer]:
        """See PeerOffers."""
        return self._ask(EngineLinkRequest(address=address, link_id=link_id, peer=self.terms))

    def answer(self, message: EngineLinkOffer) -> None:
        """The front's answer; it always comes, with an error at the latest when the server says nothing."""
        asked = self._asked.pop(message.request, None)
        if asked is None:
            return
        if message.HasField("error"):
            asked.set_exception(from_job_error(message.error))
            return
        try:
            asked.set_result(PeerOffer(offer=offer_from_wire(message.offer), worker=message.worker))
        except InvalidRequest as error:
            asked.set_exception(error)

    def _ask_server(self, request: EngineLinkRequest) -> Future[Offer]:
        wanted = Future[Offer]()
        self._ask(request).add_done_callback(lambda asked: _pass_on(asked, wanted))
        return wanted

    def _ask(self, request: EngineLinkRequest) -> Future[PeerOffer]:
        request.request = next(self._numbers)
        asked = self._asked[request.request] = Future[PeerOffer]()
        self._say(request)
        return asked


def _pass_on(asked: Future[PeerOffer], wanted: Future[Offer]) -> None:
    error = asked.exception()
    if error is not None:
        wanted.set_exception(error)
    else:
        wanted.set_result(asked.result().offer)
