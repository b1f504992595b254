"""Which host this process runs on, for those who ask whether they share it."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def host_identity() -> str:
    """Differs between running systems; "" where it cannot be told.

    Containers of one system share it, although they may see different files: only connecting shows what is reachable.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
