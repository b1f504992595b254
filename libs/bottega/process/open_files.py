"""The limit on open files and sockets, and how to recognise errors that it causes.

Linux counts files and sockets together, as descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import sys
from collections.abc import Iterator

from bottega.errors import TooManyOpenFiles

# The limit in the systemd units. A container may allow a thousand million, and some programs loop over all of them.
ENOUGH = 65_536
# With less, a server accepts fewer connections than by default, see rpc.server_config.ServerConfig.
LITTLE = 8_192
# Advice for users.
TODO = "raise LimitNOFILE in the service's unit (systemctl edit), or ulimit -Hn where it is started"

_CAUSES = frozenset({errno.EMFILE, errno.ENFILE})
# Seconds after which callers of a full server are asked to retry. Connections come and go.
_RETRY_AFTER_S = 5.0

_log = logging.getLogger(__name__)


def raise_limit() -> None:
    """Raise the limit as far as this user may. Shells often start processes with a limit of 1,024.

    Call it before anything reads the limit. Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # the hard limit is above the kernel's own, fs.nr_open
        _log.warning("the limit on open files stays %d and could not be raised to %d: %s", soft, wanted, error)


def limit() -> int:
    """Return this process's limit on open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def warn_if_low() -> None:
    """Log a warning if the limit is lower than a service needs. Call it after raise_limit."""
    if limit() < LITTLE:
        facts = {"limit": limit(), "wanted": ENOUGH, "todo": TODO}
        _log.warning("the limit on open files is low; fewer connections are accepted", extra=facts)


def is_cause(error: BaseException | None) -> bool:
    """Return whether an error means that the system refused to open one more file or socket."""
    return isinstance(error, OSError) and error.errno in _CAUSES


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Convert errors of the block for which `is_cause` is True to TooManyOpenFiles."""
    try:
        yield
    except OSError as error:
        if is_cause(error):
            raise too_many(error) from error
        raise


def exhausted() -> OSError | None:
    """Return the error if no file can be opened now, else None. For libraries that hide the system's error."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error if is_cause(error) else None
    return None


def too_many(error: OSError) -> TooManyOpenFiles:
    """Convert an error for callers and the log. `is_cause(error)` must be True."""
    cause = errno.errorcode[error.errno or errno.EMFILE]
    if error.errno == errno.ENFILE:
        what = "too many open files: the machine has as many as its kernel allows; raise fs.file-max (sysctl)"
    else:
        what = f"too many open files: the service has reached its limit of {limit()} open files and sockets; {TODO}"
    return TooManyOpenFiles(what, metadata={"cause": cause, "limit": str(limit())}, retry_after_s=_RETRY_AFTER_S)
