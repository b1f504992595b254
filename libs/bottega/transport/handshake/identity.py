"""Who and where this process is, for those who ask whether they share it, or its host. It knows no link."""

from __future__ import annotations

import functools
import os
import uuid
from pathlib import Path


def process_identity() -> str:
    """Differs between any two processes, a forked child included."""
    return _process_identity(os.getpid())


@functools.cache
def host_identity() -> str:
    """Differs between running systems; "" where it cannot be told.

    Containers of one system share it, although they may see different files: only connecting shows what is reachable.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@functools.cache
def _process_identity(pid: int) -> str:
    return f"{pid}-{uuid.uuid4().hex}"
