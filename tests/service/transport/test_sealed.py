"""Links between hosts with somebody in between, who reads, changes, repeats, reorders and cuts what passes."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import pytest

from bottega.errors import AuthFailed, LinkError
from bottega.transport import Backend, DType, Endpoints, Layout, Link, LinkListener, TensorSpec, connect
from bottega.transport.handshake.messages import CHALLENGE_BYTES, PROOF_BYTES, REQUEST_BYTES, WELCOME_BYTES
from tests.support.transport_backends import LAYOUT, content, open_link, opened, patience, read, write

# What each way carries before the first record.
HANDSHAKE = (REQUEST_BYTES + PROOF_BYTES, CHALLENGE_BYTES + WELCOME_BYTES)
SECRET = Layout.of(TensorSpec(name="secret", dtype=DType.UINT8, shape=(600_000,)))

Change = Callable[[bytes, random.Random], bytes]


class Relay:
    """Passes TCP connections on to `target` on loopback. From the first byte after the handshake on, every piece goes
    through `change`; `seen` has all that passed. ends_after_change: the connection ends behind what was changed.
    """

    def __init__(self, target: int) -> None:
        self.change: Change = lambda piece, _: piece
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


@pytest.fixture
def relayed() -> Iterator[tuple[LinkListener, Relay]]:
    with (
        LinkListener(Endpoints(tcp=("127.0.0.1", 0))) as listener,
        Relay(listener.offer().tcp.port) as relay,  # type: ignore[union-attr]
    ):
        yield listener, relay


def _ends(listener: LinkListener, relay: Relay) -> tuple[Link, Link]:
    offer = listener.offer()
    assert offer.tcp is not None
    return open_link(listener, replace(offer, tcp=replace(offer.tcp, port=relay.port)), Backend.TCP)


def _exchange(near: Link, far: Link, parts: list[bytes]) -> None:
    for _ in range(2):  # what is missing of the one is looked for in the other
        write(near, LAYOUT, parts)
    for _ in range(2):
        assert read(far, LAYOUT) == parts, "something else arrived"


def test_messages_pass_whole_and_nobody_in_between_reads_them(relayed: tuple[LinkListener, Relay]) -> None:
    listener, relay = relayed
    near, far = _ends(listener, relay)
    with near, far:
        parts = content(SECRET, 1)
        for one, other in ((near, far), (far, near)):
            write(one, SECRET, parts)
            assert read(other, SECRET) == parts
    assert len(relay.seen) > 2 * SECRET.size_bytes
    assert parts[0][1000:1064] not in relay.seen
    assert b"secret" not in relay.seen, "nor what it is called"


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_changed_on_its_way_ends_the_link_and_never_arrives(
    relayed: tuple[LinkListener, Relay], kind: str
) -> None:
    listener, relay = relayed
    for number in range(20):
        relay.change = lambda piece, _: piece
        near, far = _ends(listener, relay)
        with near, far:
            parts = content(LAYOUT, number)
            write(near, LAYOUT, parts)
            assert read(far, LAYOUT) == parts
            relay.change, relay.ends_after_change = CHANGES[kind], kind == "cut"
            with pytest.raises(LinkError):
                _exchange(near, far, parts)


def test_who_asks_a_sealing_listener_for_plain_bytes_is_refused() -> None:
    with LinkListener(Endpoints(tcp=("127.0.0.1", 0))) as listener:
        offer = listener.offer()
        with pytest.raises(AuthFailed, match="refuses the offer"):
            connect(replace(offer, sealed=False), patience(), backends=(Backend.TCP,))


def test_bytes_go_as_they_are_only_where_the_listener_says_so(tmp_path: Path) -> None:
    plain = Endpoints(tcp=("127.0.0.1", 0), unix_path=tmp_path / "links.sock", seal=False)
    with LinkListener(plain) as listener:
        assert not listener.offer().sealed
        with opened(listener, Backend.TCP) as (near, far):
            parts = content(LAYOUT, 3)
            write(near, LAYOUT, parts)
            assert read(far, LAYOUT) == parts
        with pytest.raises(AuthFailed):
            connect(replace(listener.offer(), sealed=True), patience(), backends=(Backend.TCP,))
