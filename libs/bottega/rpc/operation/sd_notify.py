"""Notifies systemd about a service of Type=notify: ready, stopping, alive.

The protocol is sd_notify(3): lines in a datagram. Without systemd nothing is sent.
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
# sd_watchdog_enabled(3) recommends half of the time, so that one message may be late.
_SHARE_OF_WATCHDOG = 0.5


class SystemdNotifier:
    """Sends notifications to the systemd that started this process. Does nothing if systemd did not.

    Args:
        environment: Environment of this process. NOTIFY_SOCKET is systemd's socket; with WATCHDOG_USEC systemd expects
            regular messages.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._watchdog_s = _watchdog_s(environment) if self._address else None

    def extend_start(self, status: str, *, within_s: float) -> None:
        """Report the progress of the start, and extend the time that systemd waits for the next message.

        Args:
            status: Text for `systemctl status`.
            within_s: Seconds that this process itself waits. systemd waits a minute longer, so that this process can
                report why it gives up.
        """
        self._notify(f"EXTEND_TIMEOUT_USEC={int((within_s + _MARGIN_S) * 1e6)}", f"STATUS={status}")

    def ready(self) -> None:
        """Report that the service has started."""
        self._notify("READY=1", "STATUS=serving")

    @contextlib.contextmanager
    def ready_if_late(self, after_s: float | None) -> Iterator[None]:
        """Report the service as started if the block, in which it warms up, takes longer than `after_s`. None: never.

        For services that answer calls while they warm up. Otherwise systemd would end them when their start times out.
        """
        if after_s is None:
            yield
            return
        late = asyncio.get_running_loop().call_later(
            after_s, self._notify, "READY=1", "STATUS=answers calls, but is not ready yet; its log says why"
        )
        try:
            yield
        finally:
            late.cancel()

    def stopping(self) -> None:
        """Report that the service accepts no new work and is stopping."""
        self._notify("STOPPING=1", "STATUS=draining")

    @contextlib.asynccontextmanager
    async def watchdog(self) -> AsyncIterator[None]:
        """Send watchdog messages while the block runs, if systemd expects them.

        If the event loop hangs, none is sent, and systemd restarts the service.
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
            # The service can go on; systemd reports missing messages itself.
            _log.warning("systemd could not be notified", extra={"message_line": lines[0], "error": error.strerror})


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds without a message after which systemd ends this process; None without a watchdog."""
    micros, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or not int(micros) or (process and process != str(os.getpid())):
        return None
    return int(micros) / 1e6
