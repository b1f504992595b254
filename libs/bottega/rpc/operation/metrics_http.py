"""A small HTTP server for scraping metrics, in which no slow or silent client delays another one.

One thread serves all. A request is handed to the WSGI application only when it is whole; until then it is a connection
that may be open for so long, and of which there may be so many, the oldest making room for the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from wsgiref.simple_server import WSGIRequestHandler
from wsgiref.types import WSGIApplication

# More than scrape one service at once; each that has not asked yet is a descriptor.
MOST_CONNECTIONS = 64
# In all: for a request to come and for its answer to be read.
CONNECTION_S = 5.0
_HEAD_BYTES = 16 << 10
_END_OF_HEAD = b"\r\n\r\n"
_STOP_S = 5.0


class MetricsHttpServer:
    """Serves an application at host:port from `start` to `stop`. The constructor binds it, and raises OSError."""

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
        self.port = int(self._socket.getsockname()[1])
        self._application = application
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Begins to serve; blocks for a moment, so that `stop` finds what it has to end."""
        self._thread.start()
        self._serves.wait(_STOP_S)

    def stop(self) -> None:
        """Ends, with every connection; once, and after start."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, sock=self._socket, limit=_HEAD_BYTES)
            )
            self._loop.call_soon(self._serves.set)
            self._loop.run_forever()
            server.close()
            for writer in self._open:
                writer.transport.abort()
            self._loop.run_until_complete(_ended(asyncio.all_tasks(self._loop)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            # It is no request, it did not come in time, or its client has gone.
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(CONNECTION_S):
                    head = await reader.readuntil(_END_OF_HEAD)
                    asked_by = writer.get_extra_info("peername") or ("", 0)  # none: its client has gone
                    writer.write(answered(head, asked_by, self._application))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()


def answered(head: bytes, client: tuple[str, int], application: WSGIApplication) -> bytes:
    """The application's answer to a request without a body, as the standard library's server would send it."""
    answer = io.BytesIO()
    _MetricsRequest(head, answer, client, application)
    return answer.getvalue()


class _MetricsRequest(WSGIRequestHandler):
    """Of a head that is here already. It is dealt with when it has been made."""

    def __init__(self, head: bytes, answer: io.BytesIO, client: tuple[str, int], application: WSGIApplication) -> None:
        self._head, self._answer = head, answer
        server = SimpleNamespace(base_environ={}, get_app=lambda: application)
        super().__init__(None, client, server)  # type: ignore[arg-type]  # neither a socket nor a server is needed

    def setup(self) -> None:
        """Instead of opening files on a socket."""
        self.rfile, self.wfile = io.BufferedReader(io.BytesIO(self._head)), self._answer

    def finish(self) -> None:
        """There is nothing to close."""

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""


async def _ended(tasks: Iterable[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
