"""A gateway as `make bench-jobs` compares it: with another number of jobs that share a commit, and on a slower disk.

Both are said in its environment. It is started as the gateway itself is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from bottega.gateway.__main__ import main
from bottega.gateway.jobs.store import sqlite_writer
from bottega.storage import SerialTask

GROUP_VARIABLE = "BENCH_MAX_GROUP"
"""Operations that share a commit, at most."""
SLOWER_VARIABLE = "BENCH_SLOWER_S"
"""Seconds that every commit takes more: in WAL mode it waits for one fsync, and so it does for one that is slower."""

_TRANSACT = sqlite_writer.GroupCommit._transact


def change(max_group: int, slower_s: float) -> None:
    """Makes every job store of this process so from now on."""

    def slowed(self: sqlite_writer.GroupCommit, group: Sequence[SerialTask]) -> None:
        _TRANSACT(self, group)
        time.sleep(slower_s)

    sqlite_writer._MAX_GROUP = max_group
    sqlite_writer.GroupCommit._transact = slowed if slower_s else _TRANSACT  # type: ignore[method-assign]


if __name__ == "__main__":
    change(int(os.environ[GROUP_VARIABLE]), float(os.environ[SLOWER_VARIABLE]))
    sys.exit(main())
