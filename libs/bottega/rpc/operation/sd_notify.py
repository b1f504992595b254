"""What systemd is told of a service that it started with Type=notify: ready, stopping, alive.

The protocol is sd_notify(3): lines in a datagram. Silent where none listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping

from bottega.background_tasks import running

_log = logging.getLogger(__name__)

_ABSTRACT = "@"
_MARGIN_S = 60.0
# sd_watchdog_enabled(3) asks for half of the time, so that one message may be late.
_SHARE_OF_WATCHDOG = 0.5


class SystemdNotifier:
    """The one that started this process, if it asked to be told.

    environment: of this process, with NOTIFY_SOCKET, and with WATCHDOG_USEC where systemd expects signs of life.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._watchdog_s = _watchdog_s(environment) if self._address else None

    def extend_start(self, status: str, *, within_s: float) -> None:
        """Say how far the start is, and have systemd wait for the next word, whatever TimeoutStartSec says.

        Args:
            status: For people, in `systemctl status`.
            within_s: For which this process waits itself; systemd waits a minute more, so that it hears why it ends.
        """
        self._notify(f"EXTEND_TIMEOUT_USEC={int((within_s + _MARGIN_S) * 1e6)}", f"STATUS={status}")

    def ready(self) -> None:
        """Say that the service is warm and serves."""
        self._notify("READY=1", "STATUS=serving")

    @contextlib.contextmanager
    def ready_if_late(self, after_s: float | None) -> Iterator[None]:
        """In the block the service gets warm. If that takes longer than `after_s`, it counts as started all the same.

        For one that answers meanwhile: systemd would end it when its time to start is over, again and again.
        """
        if after_s is None:
            yield
            return
        late = asyncio.get_running_loop().call_later(
            after_s, self._notify, "READY=1", "STATUS=answers, but does not serve yet; its log says why"
        )
        try:
            yield
        finally:
            late.cancel()

    def stopping(self) -> None:
        """The service takes no new work, and will end."""
        self._notify("STOPPING=1", "STATUS=draining")

    @contextlib.asynccontextmanager
    async def watchdog(self) -> AsyncIterator[None]:
        """Tells it for as long as the context lasts, where it asked.

        An event loop that hangs tells nothing, and the service is started anew.
        """
        if self._watchdog_s is None:
            yield
            return
        async with running(self._ping_watchdog(self._watchdog_s * _SHARE_OF_WATCHDOG)):
            yield

    async def _ping_watchdog(self, every_s: float) -> None:
        while True:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(every_s)

    def _notify(self, *lines: str) -> None:
        if not self._address:
            return
        address = self._address.replace(_ABSTRACT, "\0", 1) if self._address.startswith(_ABSTRACT) else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            # The service is none the worse for it; systemd will say what it missed.
            _log.warning("systemd could not be told", extra={"told": lines[0], "error": error.strerror})


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Silence after which systemd gives this process up; None when it does not."""
    micros, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or not int(micros) or (process and process != str(os.getpid())):
        return None
    return int(micros) / 1e6
