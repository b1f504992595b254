"""Who is at the other end of a unix socket, as the kernel says, and whether links are for them.

Links of one machine are for processes of one user, and for root. Services that run as several users, such as systemd's
units, may share them by a group, which BOTTEGA_LINKS_GROUP names to each of them.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct

from bottega.errors import ConfigError

GROUP_VARIABLE = "BOTTEGA_LINKS_GROUP"
# struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("iII")
_ROOT = 0


def links_group() -> int | None:
    """The group that shares links; None where they are for one user. Raises ConfigError for one that is not there."""
    name = os.environ.get(GROUP_VARIABLE, "")
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f"{GROUP_VARIABLE} names group {name}, which this machine does not have: make it with "
            f"groupadd --system {name}, or take the variable out of the environment"
        ) from None


def distrust_reason(connection: socket.socket, group: int | None) -> str:
    """Why links are not for the process at the other end of a connected unix socket; "" where they are.

    Of a process that listens it is whoever called listen. group: see links_group; of that process it must be the
    primary one, because an ordinary member need not be a service.
    """
    _, user, their_group = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user in {os.geteuid(), _ROOT} or (group is not None and their_group == group):
        return ""
    return f"it is a process of {user_name(user)}, and links are for {user_name(os.geteuid())}{_and_group(group)}"


def user_name(user: int) -> str:
    """A user as a person knows them."""
    try:
        return f"user {pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return f"user {user}"


def _and_group(group: int | None) -> str:
    return "" if group is None else f" and group {group}"
