"""Workers' links: what a worker asks for, and LoRAs as they lie in memory, or sent in pieces.

A worker of this host is given the memory itself. Others are sent bytes: the thread that sends says first whatever
there is to say, else a piece of the LoRA that has been on its way for longest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from bottega.caching import CacheLease, TieredCache
from bottega.errors import BottegaError, InternalError, NoSharedMemory, TooLarge
from bottega.lora import messages
from bottega.lora.messages import LoraMessageKind
from bottega.loras.config import LinksConfig
from bottega.loras.transfer import MOST_BYTES, LoraTransfer
from bottega.rpc.link_service import link_endpoints, tcp_endpoint
from bottega.rpc.status import job_error_to_json
from bottega.transport import (
    Connection,
    Incoming,
    Limits,
    Link,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    RateLimiter,
    SealedFile,
    default_socket_path,
    kind_of,
    read_number,
)

# Fetches of one worker that wait; it runs some tens of requests with at most eight LoRAs each.
_MOST_WAITING = 512
# What is smaller is one piece: copying it takes less than mapping it, and mappings are bounded in number (65,530).
_LEAST_SHARED_BYTES = 64 << 10
# What workers say is short; what they are sent, their own limits bound.
_LIMITS = Limits(slots=8, slot_bytes=1 << 20)


class LoraWorkerLink(LinkHandler):
    """bytes_per_s: of the link, within a host, too; 0 is without a limit."""

    def __init__(self, connection: Connection, *, cache: TieredCache, bytes_per_s: int) -> None:
        self._connection = connection
        self._cache = cache
        self._pace = RateLimiter(bytes_per_s, most_bytes=MOST_BYTES)
        self._shares = bytes_per_s == 0
        # Of the thread that sends: the first one is sent, the others have sent their heads.
        self._sendings: deque[LoraTransfer] = deque()
        self._waiting: set[int] = set()  # numbers of fetches whose LoRAs are being loaded
        self._counting = threading.Lock()

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """What a worker asks for is short."""
        layout = incoming.layout
        with incoming:
            views = connection.wait_all(incoming)
            match LoraMessageKind(kind_of(layout)):
                case LoraMessageKind.FETCH:
                    self._fetch(*messages.read_fetch(layout, views))
                case LoraMessageKind.CANCEL:
                    self._cancel(read_number(layout, views))
                case kind:
                    raise ValueError(f"a worker sends no {kind} message")

    def on_end(self, cause: BottegaError) -> None:
        """What is on its way to the worker is given back."""
        while self._sendings:
            self._drop(self._sendings[0])

    @property
    def idle_s(self) -> float | None:
        """Whatever there is to say goes before the next piece of a LoRA."""
        return self._pace.wait_s if self._sendings else None

    def send_idle(self, link: Link) -> None:
        """The next piece of the LoRA that has been on its way for longest."""
        first = self._sendings[0]
        self._advance(link, first, first.send_piece)

    def _fetch(self, number: int, digest: str) -> None:
        with self._counting:
            if number in self._waiting:
                raise ValueError(f"a worker asks twice as number {number}")
            if len(self._waiting) >= _MOST_WAITING:
                raise ValueError(f"a worker waits for at most {_MOST_WAITING} LoRAs")
            self._waiting.add(number)
        # Called by the thread that loads: sending is left to the thread that sends.
        self._cache.borrow(digest).add_done_callback(lambda asked: self._loaded(number, asked))

    def _cancel(self, number: int) -> None:
        """The worker does not wait for it any more: it is not sent, or no further. Harmless where it has been."""
        with self._counting:
            self._waiting.discard(number)
        self._connection.post(lambda _link: self._stop_sending(number))

    def _stop_sending(self, number: int) -> None:
        for sending in [each for each in self._sendings if each.number == number]:
            self._drop(sending)

    def _loaded(self, number: int, asked: Future[CacheLease]) -> None:
        """A load has ended, perhaps after the link."""
        if not self._connection.post(lambda link: self._hand_out(link, number, asked)) and asked.exception() is None:
            self._cache.give_back(asked.result())

    def _hand_out(self, link: Link, number: int, asked: Future[CacheLease]) -> None:
        with self._counting:
            wanted = number in self._waiting
            self._waiting.discard(number)
        try:
            lease = asked.result(timeout=0)
        except BottegaError as error:
            if wanted:
                self._refuse(link, number, error)
            return
        if not wanted:
            self._cache.give_back(lease)
            return
        if self._shares and link.passes_files and lease.resident and lease.size_bytes >= _LEAST_SHARED_BYTES:
            self._share(link, number, lease)
        else:
            self._send(link, number, lease)

    def _share(self, link: Link, number: int, lease: CacheLease) -> None:
        """Gives the worker the memory itself: it needs no lease to keep it."""
        file = SealedFile(descriptor=lease.descriptor, size_bytes=lease.size_bytes)
        try:
            self._connection.send_now(link, messages.whole_message(number, lease.times_until_now()), file=file)
        except (NoSharedMemory, TooLarge) as error:  # the link lives
            self._refuse(link, number, error)
        finally:
            self._cache.give_back(lease)

    def _send(self, link: Link, number: int, lease: CacheLease) -> None:
        try:
            sending = LoraTransfer(number, lease)
        except BottegaError as error:
            self._cache.give_back(lease)
            self._refuse(link, number, error)
            return
        self._sendings.append(sending)
        self._advance(link, sending, sending.send_head)

    def _advance(self, link: Link, sending: LoraTransfer, send_next: Callable[[Link, RateLimiter], None]) -> None:
        """Sends the next of a LoRA; gives it back when that was all, or nothing more of it can be sent."""
        try:
            send_next(link, self._pace)
        except (NoSharedMemory, TooLarge, InternalError) as error:  # the link lives
            self._drop(sending)
            self._refuse(link, sending.number, error)
        else:
            if sending.done:
                self._drop(sending)

    def _drop(self, sending: LoraTransfer) -> None:
        self._sendings.remove(sending)
        self._cache.give_back(sending.lease)

    def _refuse(self, link: Link, number: int, error: BottegaError) -> None:
        self._connection.send_now(link, messages.refused_message(number, job_error_to_json(error)))


class LoraLinks(LinkServer[LoraWorkerLink]):
    """Raises ConfigError when an address cannot be bound."""

    def __init__(self, config: LinksConfig, *, cache: TieredCache) -> None:
        self._cache = cache
        self._bytes_per_s = config.bytes_per_s
        super().__init__(
            link_endpoints(config.listen, _socket(config.socket), seal=config.seal),
            service="the LoRA store",
            settings=LinkServerSettings(limits=_LIMITS),
            advertised=tcp_endpoint(config.advertised),
        )

    def new_handler(self, connection: Connection) -> LoraWorkerLink:
        """What serves one worker."""
        return LoraWorkerLink(connection, cache=self._cache, bytes_per_s=self._bytes_per_s)


def _socket(configured: str | None) -> str | Path | None:
    return default_socket_path("loras") if configured == "" else configured
