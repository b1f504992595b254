"""What keeps a child process that opens strangers' files from doing harm, as the kernel tells it of a running one."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

_FILTERED = "2"
_told: set[tuple[str, ...]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """no_network: it has a network namespace of its own. filtered: the kernel filters its system calls.
    no_new_privileges: no program that it starts has more rights than it has."""

    no_network: bool
    filtered: bool
    no_new_privileges: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """For people."""
        parts = {
            "a network of its own": self.no_network,
            "a system-call filter": self.filtered,
            "no new privileges": self.no_new_privileges,
        }
        return tuple(part for part, there in parts.items() if not there)


def found(pid: int) -> Confinement:
    """Of a process; nothing of one that is gone, or on a system without /proc."""
    process = Path("/proc") / str(pid)
    try:
        lines = (process / "status").read_text().splitlines()
        network = (process / "ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    except OSError:
        return Confinement(no_network=False, filtered=False, no_new_privileges=False)
    status = dict(line.partition(":")[::2] for line in lines)
    return Confinement(
        no_network=network,
        filtered=status.get("Seccomp", "").strip() == _FILTERED,
        no_new_privileges=status.get("NoNewPrivs", "").strip() == "1",
    )


def tell(pid: int) -> None:
    """Logs, once in the life of this service, what a confined child lacks. Call it when the child is ready."""
    missing = found(pid).missing
    if missing and missing not in _told and os.path.exists(f"/proc/{pid}"):  # noqa: PTH110 - no path of a file
        _told.add(missing)
        _log.info(
            "processes that open strangers' files run without %s here: the kernel refuses it, or the extra 'sandbox' "
            "is not installed",
            " and ".join(missing),
        )
