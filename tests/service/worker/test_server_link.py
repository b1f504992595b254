"""A worker's link to one ControlNet server, by itself: when it cannot begin, and when too much waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bottega.addons.controlnets.engine.messages import ControlStep, StepEntry, residuals_layout
from bottega.addons.controlnets.engine.provider import ControlServer
from bottega.addons.controlnets.worker import server_link
from bottega.addons.controlnets.worker.server_link import ChangeCondition, ControlLinkSettings, ServerLink
from bottega.addons.controlnets.worker.step_result import StepResult
from bottega.device_links.tensor_messages import message_of
from bottega.errors import DeadlineExceeded, LinkClosed, LinksFull, PeerDead
from bottega.model.rows import Half
from bottega.transport import Deadline, Endpoints, LinkCounters, LinkListener, Offer, OfferSource, ServiceOffer
from tests.support.offers import OffersAtOnce
from tests.support.waiting import wait_until

WAIT_S = 20.0


class Slowly:
    """Brings an offer when it is told to."""

    def __init__(self) -> None:
        self.offer = Future[ServiceOffer]()

    def request(
        self, kind: str, address: str, link_id: str, terms: Mapping[str, str] | None = None
    ) -> Future[ServiceOffer]:
        return self.offer


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[LinkListener]:
    with LinkListener(Endpoints(unix_path=tmp_path / "links.sock")) as listener:
        yield listener


def offer_of(offer: Offer) -> ServiceOffer:
    return ServiceOffer(offer=offer, service="s")


def begun(offers: OfferSource, *, connect_s: float = 5.0) -> ServerLink:
    link = ServerLink(
        ControlServer(name="s", address="s"),
        offers=offers,
        changes=ChangeCondition(),
        settings=ControlLinkSettings(connect_s=connect_s),
        counters=LinkCounters(),
    )
    link.start()
    return link


def threads_of_links() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name in ("link-client", "link-sender")}


def test_a_link_on_which_too_much_waits_is_lost_and_leaves_nothing(listener: LinkListener) -> None:
    offers = Slowly()
    link = begun(offers)
    message = message_of({"open": torch.zeros(1)})
    for lease in range(5000):
        link.open_lease(lease, message)
    assert isinstance(link.lost, PeerDead)
    offer = listener.offer()
    offers.offer.set_result(offer_of(offer))
    with listener.accept(offer, Deadline.after(WAIT_S)) as far, pytest.raises(LinkClosed):
        far.recv(Deadline.after(WAIT_S))
    wait_until(lambda: not threads_of_links(), "the threads of the link to end")


class Crowded(OffersAtOnce):
    """Has no place at first, nor is its first offer to be had any more."""

    def __init__(self, listener: LinkListener) -> None:
        super().__init__()
        self.full = LinksFull("full", retry_after_s=0.1)
        self._listener = listener
        self.made: list[Offer] = []

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        if len(self.asked) <= 2:
            raise self.full
        self.made.append(self._listener.offer())
        gone = replace(self.made[-1], token=bytes(32))  # what a given up one is to the listener
        return offer_of(gone if len(self.asked) == 3 else self.made[-1])


def test_a_server_that_is_full_is_asked_again_until_it_has_a_place(listener: LinkListener) -> None:
    offers = Crowded(listener)
    link = begun(offers)
    wait_until(lambda: len(offers.made) == 2 or link.lost is not None, "another offer")
    with listener.accept(offers.made[1], Deadline.after(WAIT_S)):
        assert link.lost is None
        assert len(offers.asked) == 4
    wait_until(lambda: not threads_of_links(), "the threads of the link to end")


def test_a_server_is_not_given_up_for_the_time_in_which_the_worker_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(server_link, "time", SimpleNamespace(monotonic=lambda: now))
    server = ControlServer(name="s", address="s")
    link = ServerLink(
        server,
        offers=Slowly(),
        changes=ChangeCondition(),
        settings=ControlLinkSettings(stall_s=20.0),
        counters=LinkCounters(),
    )
    link.ask(step(link.number()), StepResult(residuals_layout(1, ((4, 8, 8),), torch.float32), 1))

    def look_for(seconds: float) -> None:
        nonlocal now
        for _ in range(int(seconds / 0.25)):
            now += 0.25
            link.check()

    look_for(10.0)
    now += 3600.0
    look_for(19.0)
    with pytest.raises(DeadlineExceeded, match="has made no progress"):
        look_for(2.0)


def step(number: int) -> ControlStep:
    entry = StepEntry(session=1, half=Half.CONDITIONAL, sample=0)
    return ControlStep(number=number, entries=(entry,), samples=torch.zeros(1, 4, 8, 8), timesteps=torch.zeros(1))
