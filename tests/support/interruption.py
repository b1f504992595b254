"""An interrupted run of tests ends what its tests started."""

from __future__ import annotations

import signal
from types import FrameType

# As long as a service may take to stop, twice: of what a test started, and of what all tests share.
END_TIMEOUT_S = 60.0


def handle_signals() -> None:
    """Turn SIGTERM into Ctrl-C, so that fixtures stop their services when a run is cut short.

    Ctrl-C itself is what tests send to commands, which would ignore it as a run in a shell's background does.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt_once)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C; a second signal, as of make to a group that `timeout` has told already, must not end the ending."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
