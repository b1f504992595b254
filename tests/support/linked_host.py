"""A host that has links, as a process: one end of each exchange of messages, and what became of it there.

`python -m tests.support.linked_host` obeys commands (network_namespaces.py): it listens for links and makes offers, or
connects with them; it serves offers by gRPC, or asks for one.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import grpc

from bottega.errors import LinkError
from bottega.rpc.channel import Channels, Target
from bottega.rpc.link_service import add_link_service
from bottega.rpc.security.tls import TlsConfig, TlsFiles
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.transport import (
    Backend,
    Deadline,
    DType,
    Endpoints,
    Layout,
    Limits,
    Link,
    LinkListener,
    Offer,
    TensorSpec,
    connect,
    offer_from_wire,
    offer_to_wire,
)
from bottega.v1 import link_pb2_grpc
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest
from tests.support.network_namespaces import COMMAND_S, FAR, configure, serve
from tests.support.transport_backends import content, patience, read

MESSAGES = 4
"""Each end sends so many, and the other has credit for all of them."""
LAYOUT = Layout.of(
    TensorSpec(name="residual", dtype=DType.FLOAT16, shape=(5, 7)),
    TensorSpec(name="latent", dtype=DType.UINT8, shape=(600,)),
)
SECRETS = (b"residual", b"latent", bytes(range(100, 132)))
"""In every message: what its tensors are called, and a piece of one."""
WORKER = "worker-one"
"""Who asks for a link by gRPC, and says so in its request."""

_LIMITS = Limits(slots=MESSAGES, slot_bytes=1 << 20)
_AT_ONCE = 4
_CALL_S = 3.0
_KIND, _SERVICE = "cache", "store"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of a link at one of its ends. read: messages that came, as they were sent. altered: others that came. error: what
    the link died of, "" if nothing did; text: its words.
    """

    link_id: str
    read: int = 0
    altered: int = 0
    error: str = ""
    text: str = ""


class Host:
    """listener: of the links that it offers."""

    def __init__(self) -> None:
        self._listener: LinkListener | None = None
        self._offers: dict[str, Offer] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def listen(self, seal: bool) -> int:
        """Listens for links at FAR; returns the port."""
        if self._listener is not None:
            self._listener.close()
        self._listener = LinkListener(Endpoints(tcp=(FAR, 0), seal=seal), limits=_LIMITS)
        return int(self._listener.offer().tcp.port)  # type: ignore[union-attr]

    def offer(self, count: int) -> list[str]:
        """Offers of links, as they travel."""
        assert self._listener is not None
        offers = [self._listener.offer() for _ in range(count)]
        self._offers = {each.link_id: each for each in offers}
        return [base64.b64encode(offer_to_wire(each).SerializeToString()).decode() for each in offers]

    def accept(self, within_s: float = 0.0) -> list[dict[str, object]]:
        """Has the links of its last offers opened by others, and exchanges messages on them. within_s: if not 0, for
        which it waits for them to be opened."""
        assert self._listener is not None
        deadline = Deadline.after(within_s) if within_s else patience()
        opening = functools.partial(self._listener.accept, deadline=deadline)
        return self._exchange([(each, functools.partial(opening, each)) for each in self._offers.values()], first=False)

    def connect(self, offers: list[str], sealed: bool = True) -> list[dict[str, object]]:
        """Opens these links, and exchanges messages on them. sealed: what it takes the offers for."""
        known = [
            replace(offer_from_wire(LinkOffer.FromString(base64.b64decode(each))), sealed=sealed) for each in offers
        ]
        return self._exchange([(each, functools.partial(_connected, each)) for each in known], first=True)

    def _exchange(self, links: list[tuple[Offer, Callable[[], Link]]], *, first: bool) -> list[dict[str, object]]:
        return [asdict(each) for each in self._pool.map(lambda link: _outcome(*link, first=first), links)]

    def serve(self, tls: dict[str, str]) -> str:
        """Serves offers of links by gRPC at FAR, to the worker; returns the address. tls: {} is plain text."""
        address: Future[str] = Future()
        threading.Thread(target=lambda: asyncio.run(_serve(self, TlsConfig(**tls), address)), daemon=True).start()
        return address.result(COMMAND_S)

    def ask(self, address: str, tls: dict[str, str]) -> dict[str, str]:
        """The offer of the service there, or the status with which the call failed. tls: {} is plain text."""
        return asyncio.run(_ask(Channels(TlsFiles(TlsConfig(**tls)) if tls else None), address))


class _Opener:
    """What the service of links is asked for."""

    name = _SERVICE

    def __init__(self, host: Host) -> None:
        self._host = host

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        return LinkOffer.FromString(base64.b64decode(self._host.offer(1)[0]))


async def _serve(host: Host, tls: TlsConfig, address: Future[str]) -> None:
    """As long as the process lives."""
    server = Server(_KIND, ServerConfig(listen=f"{FAR}:0", tls=tls, insecure=not tls.given))
    add_link_service(server, _KIND, _Opener(host))
    await server.start()
    address.set_result(server.address)
    await asyncio.Event().wait()


async def _ask(channels: Channels, address: str) -> dict[str, str]:
    async with channels.open(Target(address=address, role=_KIND, name=_SERVICE)) as channel:
        stub: link_pb2_grpc.LinkServiceAsyncStub = link_pb2_grpc.LinkServiceStub(channel)
        try:
            response = await stub.OpenLink(OpenLinkRequest(kind=_KIND, worker=WORKER), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            return {"refused": error.code().name}
        return {"offer": base64.b64encode(response.offer.SerializeToString()).decode()}


def _connected(offer: Offer) -> Link:
    return connect(offer, patience(), limits=_LIMITS, backends=(Backend.TCP,))


def _outcome(offer: Offer, open_link: Callable[[], Link], *, first: bool) -> Outcome:
    """Of one link: the first end sends its messages and then reads the other's. Each waits until its own are read."""
    outcome = Outcome(link_id=offer.link_id)
    try:
        with open_link() as link:
            for sends in (first, not first):
                if sends:
                    _send_messages(link, first=first)
                else:
                    _read_messages(link, outcome, first=not first)
    except LinkError as error:
        outcome.error, outcome.text = type(error).__name__, error.message
    return outcome


def _send_messages(link: Link, *, first: bool) -> None:
    for parts in _messages(first=first):
        link.send(LAYOUT, parts, patience())
    link.drain(patience())


def _read_messages(link: Link, outcome: Outcome, *, first: bool) -> None:
    for parts in _messages(first=first):
        if read(link, LAYOUT) == parts:
            outcome.read += 1
        else:
            outcome.altered += 1


@functools.cache
def _messages(*, first: bool) -> list[list[bytes]]:
    """Of the first end, or of the other."""
    return [content(LAYOUT, number if first else MESSAGES + number) for number in range(MESSAGES)]


def _main() -> None:
    host = Host()
    serve(
        {
            "configure": configure,
            "listen": host.listen,
            "offer": host.offer,
            "accept": host.accept,
            "connect": host.connect,
            "serve": host.serve,
            "ask": host.ask,
        }
    )


if __name__ == "__main__":
    _main()
