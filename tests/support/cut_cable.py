"""A way to a server that can be cut while both of its ends live."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

Pause = Callable[[bytes], float]


class Cable:
    """Carries connections to host:port `target`, which sees them come from `source`. Use `laid`.

    carried: how many there were.
    pause_s: returns the seconds for which bytes on their way to the target are held up. Set it before connections.
    """

    def __init__(self, target: str, source: str) -> None:
        self._source = source
        self._host, _, self._port = target.rpartition(":")
        self._ends: set[asyncio.StreamWriter] = set()
        self._carries = asyncio.Event()
        self._carries.set()
        self._loop = asyncio.get_running_loop()
        self.address = ""
        self.carried = 0
        self.pause_s: Pause | None = None

    def cut(self) -> None:
        """Every connection is reset; new ones are carried."""
        for end in self._ends:
            end.transport.abort()

    def go_dead(self) -> None:
        """Nothing comes through any more, and neither end is told."""
        self._carries.clear()

    def carry_again(self) -> None:
        """What was sent meanwhile comes through now, where a connection was not given up. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._carries.set)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.carried += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(
                self._host, int(self._port), local_addr=(self._source, 0)
            )
        except OSError:  # nothing listens there
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._ends |= both
        try:
            await asyncio.gather(self._copy(reader, far_writer, self.pause_s), self._copy(far_reader, writer))
        finally:
            self._ends -= both
            for end in both:
                end.transport.abort()

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pause_s: Pause | None = None,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._carries.wait()
                if pause_s is not None:
                    await asyncio.sleep(pause_s(data))
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            await self._carries.wait()
            writer.close()  # the end of this one is the end of the other


@contextlib.asynccontextmanager
async def laid(target: str, *, source: str = "127.0.0.1", host: str = "127.0.0.1") -> AsyncIterator[Cable]:
    """A cable to host:port, for as long as the block lasts. source, host: addresses of this machine, of its ends."""
    cable = Cable(target, source)
    server = await asyncio.start_server(cable.carry, host, 0)
    cable.address = f"{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield cable
    finally:
        cable.cut()
        server.close()
        await server.wait_closed()
