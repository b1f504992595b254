"""The connection of a worker's engine to one store: what it logs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import pytest

from bottega.addons.interface.store_link import StoreLink
from bottega.errors import Unavailable
from bottega.transport import Connection, Incoming, LinkClientSettings, LinkCounters, ServiceOffer
from bottega.v1.fleet_pb2 import ServiceAddress
from tests.support.waiting import wait_until


class NoOffers:
    """Refuses every connection, and counts the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def request(
        self, kind: str, address: str, link_id: str, terms: Mapping[str, str] | None = None
    ) -> Future[ServiceOffer]:
        self.asked.append((kind, address))
        offer = Future[ServiceOffer]()
        offer.set_exception(Unavailable("nothing listens there"))
        return offer


class Silent(StoreLink):
    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        raise AssertionError("there is no connection")


def test_a_store_that_cannot_be_reached_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    offers = NoOffers()
    link = Silent(
        ServiceAddress(name="near", address="host:1"),
        kind="loras",
        title="a LoRA store",
        offers=offers,
        settings=LinkClientSettings(retry_s=0.01),
        counters=LinkCounters(),
    )
    link.start()
    try:
        wait_until(lambda: len(offers.asked) > 3, "some tries")
    finally:
        link.close()
    assert not link.open
    assert offers.asked[0] == ("loras", "host:1")
    lost = [record for record in caplog.records if record.message == "a LoRA store is lost"]
    assert [vars(record)["service"] for record in lost] == ["near"]
