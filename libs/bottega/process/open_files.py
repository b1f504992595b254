"""How many files and sockets this process may have open at once: to Linux they are one, and each is a descriptor.

Also how a refusal of the system to open one more is told apart from every other fault of a disk or a network.
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

# What the units of systemd set. A container may allow a thousand million, and there are programs that walk through
# all of them.
ENOUGH = 65_536
# Below it a server takes fewer connections than it would by default, see rpc.server.ServerConfig.
LITTLE = 8_192
# What to do about it, for a person.
TODO = "raise LimitNOFILE in the service's unit (systemctl edit), or ulimit -Hn where it is started"

_CAUSES = frozenset({errno.EMFILE, errno.ENFILE})
# As long as callers of a full server are asked to wait; connections come and go.
_RETRY_AFTER_S = 5.0

_log = logging.getLogger(__name__)


def raise_limit() -> None:
    """As far as this user may, and is sane: shells often start processes with 1,024, for programs that call select.

    Call it before anything reads the limit. Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # the hard one is above the kernel's own, fs.nr_open
        _log.warning("the limit of open files stays %d, and is not raised to %d: %s", soft, wanted, error)


def limit() -> int:
    """Of this process now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def warn_if_low() -> None:
    """Logs a line when the limit is lower than a service should have. Call it after raise_limit."""
    if limit() < LITTLE:
        facts = {"limit": limit(), "wanted": ENOUGH, "todo": TODO}
        _log.warning("few files and sockets may be open at once; fewer connections are taken", extra=facts)


def is_cause(error: BaseException | None) -> bool:
    """Whether the system refused to open one more file or socket, for this process or for all."""
    return isinstance(error, OSError) and error.errno in _CAUSES


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turns what is_cause says into TooManyOpenFiles; every other error of the block stays as it is."""
    try:
        yield
    except OSError as error:
        if is_cause(error):
            raise too_many(error) from error
        raise


def exhausted() -> OSError | None:
    """Why no file can be opened now, None when one can: for libraries that do not pass on what the system said."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error if is_cause(error) else None
    return None


def too_many(error: OSError) -> TooManyOpenFiles:
    """What callers and the log are told. error: one for which is_cause holds."""
    cause = errno.errorcode[error.errno or errno.EMFILE]
    if error.errno == errno.ENFILE:
        what = "too many open files: the machine has as many as its kernel allows; raise fs.file-max (sysctl)"
    else:
        what = f"too many open files: the service has as many files and sockets open as it may, {limit()}; {TODO}"
    return TooManyOpenFiles(what, metadata={"cause": cause, "limit": str(limit())}, retry_after_s=_RETRY_AFTER_S)
