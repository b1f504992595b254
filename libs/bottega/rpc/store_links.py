"""Links from workers to a store: the server that offers them, and what the links of all stores share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bottega.errors import NoSharedMemory, TooLarge
from bottega.rpc.link_service import link_endpoints, tcp_endpoint
from bottega.rpc.links_config import LinksConfig
from bottega.transport import (
    Connection,
    Link,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    WholeMessage,
    default_socket_path,
)

HandlerT = TypeVar("HandlerT", bound=LinkHandler)


# Unsent answers of one worker, which has some tens of jobs that ask one question each.
_MOST_UNSENT = 64


class StoreLinkHandler(LinkHandler):
    """The link of one worker to a store. A worker that does not read its answers gets only refusals."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unsent = 0
        self._counting = threading.Lock()

    def _send_answer(self, answer: Callable[[], WholeMessage], refusal: WholeMessage) -> None:
        """Queue an answer to be sent.

        Args:
            answer: Makes the answer, unless too many wait to be sent.
            refusal: Sent in its place then, or if the answer is too large.
        """
        with self._counting:
            self._unsent += 1
            busy = self._unsent > _MOST_UNSENT
        queued = False
        try:
            message = refusal if busy else answer()
            queued = self._connection.post(lambda link: self._send(link, message, refusal))
        finally:
            if not queued:
                self._sent()

    def _send(self, link: Link, message: WholeMessage, refusal: WholeMessage) -> None:
        try:
            self._connection.send_now(link, message)
        except (NoSharedMemory, TooLarge):  # nothing was sent, and the link can be used further
            self._connection.send_now(link, refusal)
        finally:
            self._sent()

    def _sent(self) -> None:
        with self._counting:
            self._unsent -= 1


class StoreLinks(LinkServer[HandlerT]):
    """The links of a store to all workers. Raises ConfigError if an address cannot be bound.

    Args:
        kind: The service's kind, which names its unix socket.
        what: Names the service in texts, such as "the activation store".
    """

    def __init__(self, config: LinksConfig, *, kind: str, what: str, settings: LinkServerSettings) -> None:
        socket: str | Path | None = default_socket_path(kind) if config.socket == "" else config.socket
        super().__init__(
            link_endpoints(config.listen, socket, seal=config.seal),
            service=what,
            settings=settings,
            advertised=tcp_endpoint(config.advertised),
        )
