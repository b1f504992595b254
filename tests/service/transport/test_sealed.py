"""Links between hosts with somebody in between, who reads, changes, repeats, reorders and cuts what passes."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType

import pytest

from bottega.errors import AuthFailed, DeadlineExceeded, LinkError
from bottega.transport import (
    Backend,
    Deadline,
    DType,
    Endpoints,
    Layout,
    Link,
    LinkListener,
    Offer,
    TensorSpec,
    connect,
)
from bottega.transport.handshake.messages import CHALLENGE_BYTES, PROOF_BYTES, REQUEST_BYTES, WELCOME_BYTES
from tests.support.transport_backends import LAYOUT, content, open_link, patience, read, write

# What each way carries before the first record.
HANDSHAKE = (REQUEST_BYTES + PROOF_BYTES, CHALLENGE_BYTES + WELCOME_BYTES)
# Where a request says whether what follows is sealed.
SEALED_AT = 6
SECRET = Layout.of(TensorSpec(name="secret", dtype=DType.UINT8, shape=(600_000,)))

Change = Callable[[bytes, random.Random], bytes]


class Relay:
    """Passes TCP connections on to `target` on loopback. From the first byte after the handshake on, every piece goes
    through `change`; `seen` has all that passed. ends_after_change: the connection ends behind what was changed.
    asks_for_seals: what the requests of handshakes are changed to ask for, if not None.
    """

    def __init__(self, target: int) -> None:
        self.change: Change = lambda piece, _: piece
        self.asks_for_seals: bool | None = None
        self.ends_after_change = False
        self.seen = bytearray()
        self._target = target
        self._chance = random.Random(7)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                callee = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [caller, callee]
                for source, sink, way in ((caller, callee, 0), (callee, caller, 1)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink, HANDSHAKE[way]), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, handshake: int) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(min(64 << 10, handshake) if handshake else 64 << 10):
                self.seen += piece
                changed = piece if handshake else self.change(piece, self._chance)
                if handshake == HANDSHAKE[0] and self.asks_for_seals is not None:
                    changed = piece[:SEALED_AT] + bytes([self.asks_for_seals]) + piece[SEALED_AT + 1 :]
                sink.sendall(changed)
                if self.ends_after_change and changed != piece:
                    break
                handshake -= len(piece) if handshake else 0
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _flip(piece: bytes, chance: random.Random) -> bytes:
    changed = bytearray(piece)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(piece: bytes, chance: random.Random) -> bytes:
    return piece[: chance.randrange(len(piece))]


CHANGES: dict[str, Change] = {
    "flip": _flip,
    "cut": _cut,
    "repeat": lambda piece, _: piece * 2,
    "reorder": lambda piece, _: piece[len(piece) // 2 :] + piece[: len(piece) // 2],
    "invent": lambda piece, chance: chance.randbytes(len(piece)),
}


@contextlib.contextmanager
def relaying(*, seal: bool = True) -> Iterator[tuple[LinkListener, Relay]]:
    with (
        LinkListener(Endpoints(tcp=("127.0.0.1", 0), seal=seal)) as listener,
        Relay(listener.offer().tcp.port) as relay,  # type: ignore[union-attr]
    ):
        yield listener, relay


def _relayed(listener: LinkListener, relay: Relay) -> Offer:
    offer = listener.offer()
    assert offer.tcp is not None
    return replace(offer, tcp=replace(offer.tcp, port=relay.port))


@pytest.mark.parametrize("seal", [True, False])
def test_messages_pass_whole_and_are_read_by_others_only_without_seals(seal: bool) -> None:
    parts = content(SECRET, 1)
    with relaying(seal=seal) as (listener, relay):
        offer = _relayed(listener, relay)
        near, far = open_link(listener, offer, Backend.TCP)
        with near, far:
            for one, other in ((near, far), (far, near)):
                write(one, SECRET, parts)
                assert read(other, SECRET) == parts
    assert len(relay.seen) > 2 * SECRET.size_bytes
    for secret in (parts[0][1000:1064], b"secret"):  # a piece of it, and its name
        assert (secret in relay.seen) is not seal
    assert offer.token not in relay.seen


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_changed_on_its_way_ends_the_link_and_never_arrives(kind: str) -> None:
    with relaying() as (listener, relay):
        for number in range(8):
            relay.change, relay.ends_after_change = (lambda piece, _: piece), False
            near, far = open_link(listener, _relayed(listener, relay), Backend.TCP)
            with near, far:
                parts = content(LAYOUT, number)
                write(near, LAYOUT, parts)
                assert read(far, LAYOUT) == parts
                relay.change, relay.ends_after_change = CHANGES[kind], kind == "cut"
                with pytest.raises(LinkError):
                    _exchange(near, far, parts)


def _exchange(near: Link, far: Link, parts: list[bytes]) -> None:
    for _ in range(2):  # what is missing of the one is looked for in the other
        write(near, LAYOUT, parts)
    near.close()  # nothing more comes for a record that was made longer
    for _ in range(2):
        assert read(far, LAYOUT) == parts, "something else arrived"


@pytest.mark.parametrize(
    ("seal", "takes_for_sealed", "asks_for_seals"),
    [
        pytest.param(True, True, False, id="the request is changed to ask for plain bytes"),
        pytest.param(False, True, False, id="and the listener would send them plain"),
        pytest.param(True, False, None, id="the offer is changed to be of plain bytes"),
        pytest.param(True, False, True, id="and the request is changed to fit the listener"),
    ],
)
def test_no_link_is_talked_out_of_its_seals(seal: bool, takes_for_sealed: bool, asks_for_seals: bool | None) -> None:
    with relaying(seal=seal) as (listener, relay):
        relay.asks_for_seals = asks_for_seals
        offer = _relayed(listener, relay)
        with pytest.raises(AuthFailed):
            connect(replace(offer, sealed=takes_for_sealed), patience(), backends=(Backend.TCP,))
        with pytest.raises(DeadlineExceeded):
            listener.accept(offer, Deadline.after(0.0))
