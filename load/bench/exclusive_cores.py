"""For benches whose engine runs in their own process, while nothing else computes."""

from __future__ import annotations

import os
import sys

from bottega.process import engine_environment


def begin_with_exclusive_cores() -> None:
    """Begins this program anew where torch was imported without the environment for it; call it first."""
    wanted = engine_environment(exclusive_cores=True)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})
