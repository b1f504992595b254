"""The limits that the kernel reports for a running child process that opens untrusted files."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

_logged: set[tuple[str, ...]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStatus:
    """The restrictions that are in force for a process."""

    no_network: bool
    """It has a network namespace of its own."""
    filtered: bool
    """It has a system-call filter that this process does not have."""
    no_new_privileges: bool
    """No program that it starts has more rights than it has."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The missing restrictions, as text for users.

        The filter forbids sockets, which replaces a network namespace.
        """
        parts = {
            "a network of its own": self.no_network or self.filtered,
            "a system-call filter": self.filtered,
            "no new privileges": self.no_new_privileges,
        }
        return tuple(part for part, there in parts.items() if not there)


def found(pid: int) -> SandboxStatus | None:
    """Return the status of a process, or None if it is unknown: the process is gone, or there is no /proc."""
    process, this = Path("/proc") / str(pid), Path("/proc/self")
    try:
        network = (process / "ns/net").readlink() != (this / "ns/net").readlink()
        theirs, ours = _status(process), _status(this)
    except OSError:
        return None
    return SandboxStatus(
        no_network=network,
        filtered=_filters(theirs) > _filters(ours),
        no_new_privileges=theirs.get("NoNewPrivs") == "1",
    )


def log_missing(pid: int) -> None:
    """Log once which restrictions a confined child lacks. Call it when the child is ready."""
    known = found(pid)
    if known is None or not known.missing or known.missing in _logged:
        return
    _logged.add(known.missing)
    _log.info(
        "processes that open untrusted files lack %s: the kernel refuses it, or the extra 'sandbox' is not installed",
        " and ".join(known.missing),
    )


def _status(process: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in (process / "status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


def _filters(status: dict[str, str]) -> int:
    """Return the number of filters in force. Kernels before 5.9 report only whether there are any.

    Services may have one from systemd.
    """
    return int(status.get("Seccomp_filters") or status.get("Seccomp") == "2")
