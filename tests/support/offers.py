"""Offers of links whose answers are there at once, where a worker's front would bring them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future

from bottega.errors import BottegaError
from bottega.transport import ServiceOffer


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
