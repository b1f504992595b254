"""Reads from the kernel which process is at the other end of a unix socket, and decides whether it may have a link.

Links of one machine are for processes of one user and root. Services that run as several users, such as systemd units,
may share them through a group, which BOTTEGA_LINKS_GROUP names to each of them.
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
    """Return the group that shares links, or None if they are for one user.

    Raises ConfigError if the group does not exist.
    """
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
    """Return why the process at the other end of a connected unix socket may have no link; "" if it may.

    For a listening socket, that is the process that called listen.

    Args:
        group: See links_group. It must be the primary group of the process, because an ordinary member need not be a
            service.
    """
    _, user, their_group = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user in {os.geteuid(), _ROOT} or (group is not None and their_group == group):
        return ""
    return f"it is a process of {user_name(user)}, and links are for {user_name(os.geteuid())}{_and_group(group)}"


def user_name(user: int) -> str:
    """Return a user's name and number as text."""
    try:
        return f"user {pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return f"user {user}"


def _and_group(group: int | None) -> str:
    return "" if group is None else f" and group {group}"
