"""Whoever comes to a listener without the token gets nothing, costs little, and disturbs nobody."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import AuthFailed, Code, ConfigError, DeadlineExceeded, LinkClosed, LinksFull
from bottega.sampled_log import LINES_PER_SECOND
from bottega.transport import (
    Backend,
    Deadline,
    Endpoints,
    Limits,
    Link,
    LinkListener,
    MemfdEndpoint,
    Offer,
    TcpEndpoint,
    connect,
)
from bottega.transport.handshake import acceptor
from bottega.transport.handshake import messages as handshake
from bottega.transport.handshake.acceptor import MAX_PENDING_CONNECTIONS
from bottega.transport.handshake.listener import MAX_OFFERS, MAX_OFFERS_OF_ONE, SAFE_S
from bottega.transport.handshake.messages import CHALLENGE_BYTES, REQUEST_BYTES, Direction, Verdict
from tests.support.transport_backends import check_message, listening, open_descriptors, opened, patience

WAYS = (Backend.MEMFD, Backend.TCP)
# Workers that come back to one server at once.
_CROWD = 100
_UNKNOWN_PEERS = 100


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[LinkListener]:
    with listening(tmp_path) as made:
        yield made


def _dial(offer: Offer, way: Backend) -> socket.socket:
    if way == Backend.TCP:
        assert offer.tcp
        return socket.create_connection((offer.tcp.host, offer.tcp.port), timeout=30)
    assert offer.memfd
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(offer.memfd.path)
    return connection


def _hears_nothing_more(connection: socket.socket) -> bool:
    """Whether the listener hangs up, after at most a refusal."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while got := connection.recv(4096):
            heard += got
    return len(heard) <= CHALLENGE_BYTES


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * REQUEST_BYTES,
        b"\0" * REQUEST_BYTES,
        b"\xff" * 10_000,
        b"btg1" + b"\xff" * REQUEST_BYTES,
    ],
)
def test_what_is_no_handshake_is_turned_away_and_a_link_goes_on(
    listener: LinkListener, way: Backend, said: bytes
) -> None:
    with opened(listener, way) as (near, far):
        with _dial(listener.offer(), way) as peer:
            peer.sendall(said)
            assert _hears_nothing_more(peer)
        check_message(near, far)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_wrong_token_is_refused_and_does_not_use_up_the_right_one(listener: LinkListener, way: Backend) -> None:
    offer = listener.offer()
    with pytest.raises(AuthFailed):
        connect(replace(offer, token=bytes(32)), patience(), backends=(way,))
    with _dial(offer, way) as peer:
        request = handshake.handshake_request(
            offer, way, Direction.CONNECTOR_SENDS, Limits(), sealed=way is Backend.TCP
        )
        peer.sendall(request)
        assert peer.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)[4] == Verdict.WELCOME
        peer.sendall(bytes(32))
        assert peer.recv(10) == bytes([Verdict.REFUSED])
        assert _hears_nothing_more(peer)
    with connect(offer, patience(), backends=(way,)) as near, listener.accept(offer, patience()) as far:
        check_message(near, far)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_recorded_handshake_opens_nothing(listener: LinkListener, way: Backend) -> None:
    offer = listener.offer()
    request = handshake.handshake_request(offer, way, Direction.CONNECTOR_SENDS, Limits(), sealed=way is Backend.TCP)
    with _dial(offer, way) as first:
        first.sendall(request)
        proof = handshake.answer_challenge(offer.token, request, first.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        with _dial(offer, way) as second:  # knows all that the first one said, and not the token
            second.sendall(request)
            second.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            second.sendall(proof)
            assert second.recv(10) == bytes([Verdict.REFUSED])
        first.sendall(proof)
        assert first.recv(1) == bytes([Verdict.WELCOME])
        with _dial(offer, way) as third:
            third.sendall(request)
            assert third.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)[4] == Verdict.REFUSED


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_crowd_of_unknown_peers_is_a_few_lines_in_the_log_and_its_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: Backend
) -> None:
    caplog.set_level(logging.INFO)
    with listening(tmp_path) as listener:
        offer = listener.offer()
        began = time.monotonic()
        for _ in range(_UNKNOWN_PEERS):
            with _dial(offer, way) as peer:
                peer.sendall(b"\0" * REQUEST_BYTES)
                assert _hears_nothing_more(peer)
        seconds = time.monotonic() - began
    told = [line for line in caplog.records if line.message == "a connection for a link was refused"]
    more = [line for line in caplog.records if line.message == "more connections for links were refused"]
    assert len(told) <= LINES_PER_SECOND * (seconds + 2)
    assert len(told) + sum(line.__dict__["connections"] for line in more) == _UNKNOWN_PEERS
    assert {line.__dict__["backend"] for line in told + more} == {way}


def test_a_listener_that_does_not_know_the_token_is_found_out(tmp_path: Path) -> None:
    with listening(tmp_path) as real:
        offer = real.offer()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(5)
        lured = replace(offer, memfd=None, tcp=TcpEndpoint(host="127.0.0.1", port=impostor.getsockname()[1]))
        with contextlib.ExitStack() as stack:

            def answer() -> None:
                connection = stack.enter_context(impostor.accept()[0])
                heard = connection.recv(REQUEST_BYTES, socket.MSG_WAITALL)
                connection.sendall(handshake.challenge(bytes(32), heard)[0])

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(AuthFailed, match="does not know the offer's token"):
                connect(lured, patience(), backends=(Backend.TCP,))
            thread.join(5)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_silent_peers_are_few_and_do_not_keep_others_out(
    listener: LinkListener, way: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 600.0)  # none of them is turned out for its time
    before = open_descriptors()
    offer = listener.offer()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(_dial(offer, way)) for _ in range(MAX_PENDING_CONNECTIONS * 2)]
        with connect(offer, patience(), backends=(way,)) as near, listener.accept(offer, patience()) as far:
            held = open_descriptors() - before - len(silent) - 4
            assert held <= MAX_PENDING_CONNECTIONS
            check_message(near, far)


def test_a_crowd_that_comes_at_once_gets_in(listener: LinkListener) -> None:
    begin = threading.Barrier(_CROWD)

    def come(offer: Offer) -> Link:
        begin.wait(10)
        return connect(offer, patience(), backends=(Backend.TCP,))

    with ThreadPoolExecutor(_CROWD) as pool:
        for link in pool.map(come, [listener.offer() for _ in range(_CROWD)]):
            link.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_peer_that_takes_its_time_is_turned_out(
    listener: LinkListener, way: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.2)
    with _dial(listener.offer(), way) as slow:
        slow.sendall(b"btg1")
        assert _hears_nothing_more(slow)


def test_the_probe_tries_the_next_way_and_says_why(listener: LinkListener, tmp_path: Path) -> None:
    offer = listener.offer()
    assert offer.memfd
    missing = replace(offer, memfd=replace(offer.memfd, path=str(tmp_path / "missing.sock")))
    with connect(missing, patience()) as near, listener.accept(offer, patience()) as far:
        assert near.backend_choice.backend == far.backend_choice.backend == Backend.TCP
        assert near.backend_choice.reason == (
            "memfd: cannot be reached: No such file or directory; tcp: the address answers"
        )
    offer = listener.offer()
    elsewhere = replace(offer, memfd=MemfdEndpoint(path="/x", host="another boot"))
    with connect(elsewhere, patience()) as near, listener.accept(offer, patience()):
        assert "memfd: the listener is on another host" in near.backend_choice.reason
    offer = listener.offer()
    with connect(offer, patience()) as near, listener.accept(offer, patience()):
        assert near.backend_choice.backend == Backend.MEMFD


def test_a_listener_that_says_nothing_costs_the_deadline(listener: LinkListener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tcp = TcpEndpoint(host="127.0.0.1", port=silent.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            connect(replace(listener.offer(), tcp=tcp), Deadline.after(0.1), backends=(Backend.TCP,))
        assert time.monotonic() - began < 2


def test_a_listener_binds_only_what_it_is_told(tmp_path: Path) -> None:
    with LinkListener(Endpoints()) as nowhere:
        offer = nowhere.offer()
        assert (offer.memfd, offer.tcp) == (None, None)
    path = tmp_path / "links.sock"
    with LinkListener(Endpoints(unix_path=path)) as here:
        assert here.offer().tcp is None
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="links cannot listen on"):
            LinkListener(Endpoints(unix_path=path))
    assert not path.exists()


def test_the_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "links.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with LinkListener(Endpoints(unix_path=path)) as listener, opened(listener, Backend.MEMFD) as (near, far):
        check_message(near, far)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "links.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError):
        LinkListener(Endpoints(unix_path=path))
    assert path.read_text() == "precious"


def test_a_taken_port_is_a_config_error_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "links.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        LinkListener(Endpoints(tcp=taken.getsockname()[:2], unix_path=path))
    with LinkListener(Endpoints(unix_path=path)):
        pass


def test_offers_are_bounded_by_caller_and_end_with_their_listener(listener: LinkListener) -> None:
    offers = [listener.offer(caller="near") for _ in range(MAX_OFFERS_OF_ONE)]
    with pytest.raises(LinksFull) as full:
        listener.offer(caller="near")
    assert full.value.metadata == {"limit": "offers"}
    assert full.value.retry_after_s
    assert full.value.code == Code.UNAVAILABLE
    listener.offer(offers[0].link_id, caller="near")  # the next epoch of one takes no more room
    listener.offer(caller="far")  # and others are not in each other's way
    listener.close()
    with pytest.raises(LinkClosed):
        listener.accept(offers[1], patience())
    with pytest.raises(LinkClosed):
        listener.offer()


def test_those_that_nobody_takes_up_make_room_for_the_next_of_their_caller(tmp_path: Path) -> None:
    with listening(tmp_path, token_s=60) as listener:
        patient = listener.offer(caller="far")
        left = [listener.offer(caller="near") for _ in range(MAX_OFFERS_OF_ONE)]
        time.sleep(SAFE_S)
        newest = listener.offer(caller="near")
        with pytest.raises(AuthFailed):  # the oldest of them is gone, at once and not after its time
            listener.accept(left[0], patience())
        for offer in (left[1], newest, patient):
            with connect(offer, patience(), backends=(Backend.MEMFD,)), listener.accept(offer, patience()):
                pass


def test_all_callers_together_are_bounded_at_the_cost_of_whoever_has_most(tmp_path: Path) -> None:
    with listening(tmp_path, token_s=60) as listener:
        many = [listener.offer(caller="many") for _ in range(MAX_OFFERS_OF_ONE)]
        others = [listener.offer(caller=f"caller {number}") for number in range(MAX_OFFERS - MAX_OFFERS_OF_ONE)]
        with pytest.raises(LinksFull):
            listener.offer(caller="another")
        time.sleep(SAFE_S)
        listener.offer(caller="another")
        with pytest.raises(AuthFailed):
            listener.accept(many[0], patience())
        with connect(others[0], patience(), backends=(Backend.MEMFD,)), listener.accept(others[0], patience()):
            pass


def test_half_a_visit_is_cleaned_up_when_its_offer_expires(tmp_path: Path) -> None:
    with listening(tmp_path, token_s=0.2) as listener:
        offer = listener.offer()
        request = handshake.handshake_request(offer, Backend.TCP, Direction.CONNECTOR_SENDS, Limits(), sealed=True)
        with _dial(offer, Backend.TCP) as visitor:
            visitor.sendall(request)
            visitor.sendall(
                handshake.answer_challenge(offer.token, request, visitor.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
            )
            assert visitor.recv(1) == bytes([Verdict.WELCOME])
            with pytest.raises(AuthFailed):
                listener.accept(offer, Deadline.after(5))
            assert visitor.recv(1) == b""
