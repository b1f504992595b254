"""Links between two hosts, each a process in a network namespace of its own, with somebody between them through whom
all passes: what is changed on its way is refused, and what passes says nothing.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bottega.transport.handshake.messages import Direction
from bottega.v1.link_pb2 import LinkOffer
from tests.support.certificates import Authority
from tests.support.linked_host import MESSAGES, SECRETS, WORKER, Outcome
from tests.support.network_namespaces import Network, network, why_none
from tests.support.record_relay import KINDS, Flow, Tampering

# Below the offers that one caller may have open.
_BATCH = 100


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    if why := why_none():
        pytest.skip(why)
    with network(host="tests.support.linked_host", between="tests.support.record_relay") as made:
        yield made


def _listening(hosts: Network, *, seal: bool = True, mode: str = "") -> None:
    """The far host listens for links; the one in between does `mode` to them, and has seen nothing yet."""
    hosts.between.call("search", needles=[])
    hosts.between.call("tampered")
    hosts.between.call("listen", port=hosts.far.call("listen", seal=seal))
    hosts.between.call("mode", mode=mode)


def _exchanged(hosts: Network, offers: list[str]) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Opens the links of the far host's last offers and exchanges messages on them: outcomes there, by link, and at the
    near host.
    """
    hosts.far.start("accept")
    near = hosts.near.call("connect", offers=offers)
    far, near = ({each["link_id"]: Outcome(**each) for each in outcomes} for outcomes in (hosts.far.result(), near))
    return far, near


def _tokens(offers: list[str]) -> list[bytes]:
    return [_decoded(offer).token for offer in offers]


def _decoded(offer: str) -> LinkOffer:
    return LinkOffer.FromString(base64.b64decode(offer))


def _seen(hosts: Network, needles: list[bytes]) -> set[bytes]:
    """Which of these the one in between has seen since the last search. Something it has."""
    seen = hosts.between.call("search", needles=[each.hex() for each in needles])
    assert seen["size_bytes"] > 0
    return {bytes.fromhex(each) for each in seen["found"]}


def _whole(link_id: str) -> Outcome:
    return Outcome(link_id=link_id, read=MESSAGES)


def test_messages_pass_whole_and_say_nothing_on_their_way(hosts: Network) -> None:
    _listening(hosts)
    offers = hosts.far.call("offer", count=10)
    for outcomes in _exchanged(hosts, offers):
        assert len(outcomes) == 10
        assert outcomes == {link_id: _whole(link_id) for link_id in outcomes}
    assert not _seen(hosts, [*SECRETS, *_tokens(offers)])


def test_without_seals_all_of_it_can_be_read(hosts: Network) -> None:
    """So the searches of these tests find what is there to be found."""
    _listening(hosts, seal=False)
    offers = hosts.far.call("offer", count=2)
    hosts.far.start("accept")
    assert [each["error"] for each in hosts.near.call("connect", offers=offers, sealed=False)] == ["", ""]
    hosts.far.result()
    assert _seen(hosts, [*SECRETS, *_tokens(offers)]) == set(SECRETS)


@pytest.mark.parametrize("links", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_is_changed_on_its_way_ends_its_link_and_says_nothing(
    hosts: Network, kind: str, links: int
) -> None:
    """One record of each link, in any of its four flows: tensors and credit, there and back."""
    _listening(hosts, mode=kind)
    flows: Counter[Flow] = Counter()
    for begin in range(0, links, _BATCH):
        offers = hosts.far.call("offer", count=min(_BATCH, links - begin))
        far, near = _exchanged(hosts, offers)
        assert not _seen(hosts, [*SECRETS, *_tokens(offers)])
        tampered = hosts.between.call("tampered")
        assert set(tampered) == set(far) == set(near)
        for link_id, done in tampered.items():
            tampering = _tampering(done)
            reader = (far if tampering.flow.to_listener else near)[link_id]
            _check_refused(tampering, reader)
            assert far[link_id].altered == near[link_id].altered == 0
            flows[tampering.flow] += 1
    assert sum(flows.values()) == links
    assert min(flows.values()) > links / 8
    assert len(flows) == 4


def _tampering(done: dict[str, Any]) -> Tampering:
    flow = done.pop("flow")
    return Tampering(flow=Flow(Direction(flow["direction"]), flow["to_listener"]), **done)


def _check_refused(tampering: Tampering, reader: Outcome) -> None:
    """The end that reads the changed flow has what came before the change, and nothing behind it."""
    assert tampering.done
    if reader.error == "BadFrame":
        assert "sealed record" in reader.text
    else:  # a stream that just ends within a record
        assert reader.error == "PeerDead", (tampering, reader)
        assert not tampering.in_whole_records, (tampering, reader)
    if tampering.flow.has_tensors:
        assert reader.read == max(tampering.whole - 1, 0), (tampering, reader)
    else:  # the far end sends last
        assert reader.read == (MESSAGES if tampering.flow.to_listener else 0), (tampering, reader)


@pytest.mark.parametrize(
    ("seal", "takes_for_sealed", "mode"),
    [
        pytest.param(True, True, "unsealed", id="the request is changed to ask for plain bytes"),
        pytest.param(False, True, "unsealed", id="and the listener would send them plain"),
        pytest.param(True, False, "", id="the offer is changed to be of plain bytes"),
        pytest.param(True, False, "sealed", id="and the request is changed to fit the listener"),
    ],
)
def test_no_link_is_talked_out_of_its_seals(hosts: Network, seal: bool, takes_for_sealed: bool, mode: str) -> None:
    _listening(hosts, seal=seal, mode=mode)
    offers = hosts.far.call("offer", count=1)
    [near] = hosts.near.call("connect", offers=offers, sealed=takes_for_sealed)
    assert (near["error"], near["read"]) == ("AuthFailed", 0)
    [far] = hosts.far.call("accept", within_s=0.2)
    assert (far["error"], far["read"]) == ("DeadlineExceeded", 0), "it was never opened"
    assert not _seen(hosts, [*SECRETS, *_tokens(offers)])


def test_offers_cross_the_network_by_tls_alone(hosts: Network, tmp_path: Path) -> None:
    """As a worker gets them: the token by which a link's records are sealed is in them."""
    _listening(hosts)
    authority = Authority(tmp_path)
    worker, service = asdict(authority.issue(f"worker/{WORKER}")), asdict(authority.issue("cache/store"))
    sealed, plain = hosts.far.call("serve", tls=service), hosts.far.call("serve", tls={})
    for address in (sealed, plain):
        hosts.between.call("listen", port=int(address.rpartition(":")[2]))
    offer = hosts.near.call("ask", address=sealed, tls=worker)["offer"]
    assert [each for outcomes in _exchanged(hosts, [offer]) for each in outcomes.values()] == [
        _whole(_decoded(offer).link_id)
    ] * 2
    assert not _seen(hosts, [WORKER.encode(), *SECRETS, *_tokens([offer])])

    assert hosts.near.call("ask", address=plain, tls=worker) == {"refused": "UNAVAILABLE"}
    assert not _seen(hosts, [WORKER.encode()]), "whoever answers a TLS client in plain text hears nothing"
    assert hosts.near.call("ask", address=sealed, tls={}) == {"refused": "UNAVAILABLE"}
    assert not _seen(hosts, [WORKER.encode()])

    told = hosts.near.call("ask", address=plain, tls={})["offer"]
    assert _seen(hosts, [WORKER.encode(), *_tokens([told])]) == {WORKER.encode(), *_tokens([told])}, "all of it is seen"
