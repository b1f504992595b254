"""Where the engine asks for links to ControlNet servers, and the front's answers come in. Knows no link."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

from bottega.errors import InvalidRequest
from bottega.rpc.status import from_job_error
from bottega.transport import Offer, offer_from_wire
from bottega.v1.engine_pb2 import EngineLinkOffer, EngineLinkRequest


class LinkDesk:
    """Any thread may ask; one hears the answers. say: tells the front."""

    def __init__(self, say: Callable[[EngineLinkRequest], None]) -> None:
        self._say = say
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Offer]] = {}

    def ask(self, address: str, link_id: str) -> Future[Offer]:
        """See Offers."""
        number = next(self._numbers)
        asked = self._asked[number] = Future[Offer]()
        self._say(EngineLinkRequest(request=number, address=address, link_id=link_id))
        return asked

    def answer(self, message: EngineLinkOffer) -> None:
        """The front's answer; it always comes, with an error at the latest when the server says nothing."""
        asked = self._asked.pop(message.request, None)
        if asked is None:
            return
        if message.HasField("error"):
            asked.set_exception(from_job_error(message.error))
            return
        try:
            asked.set_result(offer_from_wire(message.offer))
        except InvalidRequest as error:
            asked.set_exception(error)
