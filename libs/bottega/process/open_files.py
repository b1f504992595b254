"""How many files and sockets this process may have open at once: to Linux they are one, and each is a descriptor."""

from __future__ import annotations

import logging
import resource
import sys

_log = logging.getLogger(__name__)


def raise_limit() -> None:
    """As far as this user may: shells and containers often start processes with 1,024, for programs that call select.

    Call it before anything reads the limit. Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # the hard one is above the kernel's own, fs.nr_open
        _log.warning("the limit of open files stays %d, and is not raised to %d: %s", soft, hard, error)


def limit() -> int:
    """Of this process now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
