"""A pair's link ends within a second or two when the other worker takes no messages, and not only once it is silent."""

from __future__ import annotations

from pathlib import Path

import torch

from bottega.engine.engine import Engine
from bottega.engine.limits import EngineLimits
from bottega.engine.parallel.remote_rows import RemoteJob
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half
from bottega.transport import Limits, LinkCounters, LinkListener, Offer, ServiceOffer, connect
from bottega.worker.peer import Leader
from tests.support.offers import OffersAtOnce
from tests.support.pair_follower import FollowerThread
from tests.support.transport_backends import listening, patience
from tests.support.waiting import wait_until

# The waits of the pair are 1 s each; those of other links are 5 and 20 s.
WITHIN_S = 3.0
ONE_MESSAGE = Limits(slots=1)


class OffersOf(OffersAtOnce):
    """Offers of one listener."""

    def __init__(self, listener: LinkListener) -> None:
        super().__init__()
        self.made: list[Offer] = []
        self._listener = listener

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        self.made.append(self._listener.offer(link_id or None))
        return ServiceOffer(offer=self.made[-1], service="follower")


def _job() -> RemoteJob:
    embeds = Embeds(prompt=torch.zeros(2, 3), added={"text_embeds": torch.zeros(3), "time_ids": torch.zeros(6)})
    return RemoteJob(halves={Half.CONDITIONAL: embeds})


def test_a_leader_gives_up_a_follower_that_takes_no_messages(tmp_path: Path) -> None:
    with listening(tmp_path, limits=ONE_MESSAGE) as listener:
        offers = OffersOf(listener)
        leader = Leader("follower:1", terms={}, offers=offers, counters=LinkCounters())
        leader.start()
        wait_until(lambda: bool(offers.made), "the leader to come")
        with listener.accept(offers.made[0], patience()):
            wait_until(lambda: leader.linked, "the link")
            for _ in range(2):
                leader.accepts(_job())
            wait_until(lambda: not leader.linked, "the leader to give up", within_s=WITHIN_S)
        leader.stop()


def test_a_follower_gives_up_a_leader_that_takes_no_messages(model: Model) -> None:
    with FollowerThread(Engine(model, EngineLimits(max_rows=4))) as follower:
        offer = follower.request("", "", "").result().offer
        with connect(offer, patience(), limits=ONE_MESSAGE) as link:
            wait_until(lambda: follower.linked, "the link")  # and the first message: whether it is busy
            follower.busy = True
            wait_until(lambda: not follower.linked, "the follower to give up", within_s=WITHIN_S)
            assert link.counters.snapshot().received.messages == 0
