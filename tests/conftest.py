"""What holds for every test: the environment of torch, and that an interrupted run still ends what it started."""

from __future__ import annotations

import os
import signal

# Read when torch is first imported, here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The last bits of a result depend on the number of threads; the tests' own should not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Nothing is downloaded at run time; a test that tries fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure() -> None:
    """Turns SIGTERM into Ctrl-C, so that fixtures stop their services when a run is cut short.

    Ctrl-C itself is what tests send to commands, which would ignore it as a run in a shell's background does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
