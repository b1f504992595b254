"""Offers come out of the wire as they went in, never show their token, and are refused where they lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from bottega.errors import InvalidRequest
from bottega.transport import Deadline, Limits, MemfdEndpoint, Offer, TcpEndpoint, offer_from_wire, offer_to_wire
from bottega.v1.link_pb2 import LinkOffer

OFFER = Offer(
    link_id="0123456789abcdef" * 2,
    token=bytes(range(32)),
    epoch=3,
    limits=Limits(slots=4, slot_bytes=1 << 20, layouts=9),
    memfd=MemfdEndpoint(path="/run/links.sock", host="boot"),
    tcp=TcpEndpoint(host="127.0.0.1", port=8480),
)


def test_an_offer_comes_back_as_it_was() -> None:
    for memfd in (OFFER.memfd, None):
        for tcp in (OFFER.tcp, None):
            offer = replace(OFFER, memfd=memfd, tcp=tcp)
            assert offer_from_wire(LinkOffer.FromString(offer_to_wire(offer).SerializeToString())) == offer


def test_the_token_is_not_printed() -> None:
    assert repr(OFFER.token) not in repr(OFFER)
    assert "token" not in repr(OFFER)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.ClearField("link_id"),
        lambda m: setattr(m, "link_id", "0" * 31),
        lambda m: setattr(m, "link_id", "../" + "0" * 29),
        lambda m: setattr(m, "token", b"short"),
        lambda m: setattr(m, "epoch", 0),
        lambda m: setattr(m, "epoch", 2**64 - 1),
        lambda m: m.ClearField("limits"),
        lambda m: setattr(m.limits, "slots", 10**6),
        lambda m: setattr(m.tcp, "port", 0),
        lambda m: setattr(m.tcp, "port", 65536),
        lambda m: setattr(m.memfd, "path", "x" * 2000),
    ],
)
def test_an_offer_that_no_listener_made_is_refused(spoil: Callable[[LinkOffer], object]) -> None:
    message = offer_to_wire(OFFER)
    spoil(message)
    with pytest.raises(InvalidRequest) as raised:
        offer_from_wire(message)
    assert raised.value.violations


@pytest.mark.parametrize("at", [math.inf, math.nan])
def test_there_is_no_deadline_that_never_comes(at: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Deadline(at=at)
