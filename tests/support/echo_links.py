"""A service whose links send every number back."""

from __future__ import annotations

from pathlib import Path

from bottega.errors import BottegaError
from bottega.transport import (
    Connection,
    Endpoints,
    Incoming,
    Limits,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    number_message,
    read_number,
)


class Echo(LinkHandler):
    """Sends every number back. ended: why its link has."""

    def __init__(self) -> None:
        self.ended: BottegaError | None = None

    @property
    def progress(self) -> int:
        return 7

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        with incoming:
            number = read_number(incoming.layout, connection.wait_all(incoming))
        connection.send(number_message("echo", number))

    def on_end(self, cause: BottegaError) -> None:
        self.ended = cause


class EchoServer(LinkServer[Echo]):
    def __init__(self, folder: Path, *, receive_s: float = 20.0) -> None:
        settings = LinkServerSettings(limits=Limits(), receive_s=receive_s, max_links=6, max_links_per_host=4)
        super().__init__(Endpoints(unix_path=folder / "links.sock"), service="the server", settings=settings)

    def new_handler(self, connection: Connection) -> Echo:
        return Echo()
