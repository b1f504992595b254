"""Binds exactly the configured addresses and paths of links, and decides which processes may open a link.

A folder is opened first and the open descriptor is checked, so that nobody can swap the folder in between. The kernel
tells which process is at the other end of a unix socket. Links within a machine are for processes of one user and root.
Services that run as several users, such as systemd units, may share them through a group, which BOTTEGA_LINKS_GROUP
names in the environment of each.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import ConfigError

GROUP_VARIABLE = "BOTTEGA_LINKS_GROUP"
# struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("iII")
# systemd makes the first folder for a unit's sockets, and other units can see it. The second is for all of a user's
# processes.
_UNIT_VARIABLE = "RUNTIME_DIRECTORY"
_USER_VARIABLE = "XDG_RUNTIME_DIR"
_ROOT = 0
_WRITERS = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ELSEWHERE = "or give links a socket in another folder (links.socket in its configuration)"
# Callers of a unix socket that may wait; more are refused at once. See acceptor.MAX_PENDING_CONNECTIONS.
_BACKLOG = 256
# Size of sun_path in sockaddr_un, less its final zero.
_MAX_PATH_BYTES = 107
_PROBE_S = 0.2
_OWN_MODE = 0o600
_SHARED_MODE = 0o660


def links_group() -> int | None:
    """Return the group whose members may open links, or None if links are for one user.

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
    """Return the reason why the process at the other end of a unix socket may not have a link; "" if it may.

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
    """Return the name and ID of a user as text."""
    try:
        return f"user {pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return f"user {user}"


def _and_group(group: int | None) -> str:
    return "" if group is None else f" and group {group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The addresses on which a listener accepts links. Raises ValueError for a path that is too long."""

    tcp: tuple[str, int] | None = None
    """Host and port to bind; port 0 means any free port. Offers contain the same host. None: no TCP."""
    unix_path: Path | None = None
    """Path of the unix socket for this user, root and the group of `links_group`; None for none."""
    seal: bool = True
    """Whether bytes over TCP are encrypted. If so, links between devices of two hosts are refused."""

    def __post_init__(self) -> None:
        if self.unix_path is not None and len(os.fsencode(self.unix_path)) > _MAX_PATH_BYTES:
            raise ValueError(f"{self.unix_path} is over {_MAX_PATH_BYTES} bytes, too long for a unix socket")


def bind_tcp(host: str, port: int) -> socket.socket:
    """Create a listening TCP socket. Raises ConfigError."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"links cannot listen on {host}:{port}: {error.strerror or error}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bind_unix(path: Path) -> socket.socket:
    """Create a listening unix socket for this user and the links' group. It replaces one that a dead process left.

    Raises ConfigError, also if other users could replace the socket.
    """
    try:
        folder = open_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"links cannot listen on {path}: {error.strerror or error}") from None
    try:
        _remove_left_over(path, folder)
        return _listening(path, folder, links_group())
    except OSError as error:
        raise ConfigError(f"links cannot listen on {path}: {error.strerror or error}") from None
    finally:
        os.close(folder)


def _listening(path: Path, folder: int, group: int | None) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        # The folder was checked and nobody else can create entries in it, so this is the socket that was just bound.
        made = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if group is not None and made.st_gid != group:
            os.chown(path.name, -1, group, dir_fd=folder)
        # Before it listens, so that nobody connects with the wrong mode.
        os.chmod(path.name, _OWN_MODE if group is None else _SHARED_MODE, dir_fd=folder)
        bound.listen(_BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


def _remove_left_over(path: Path, folder: int) -> None:
    """Remove the socket of a dead process. A socket with a listener stays, and binding then fails."""
    with suppress(OSError):
        if not stat.S_ISSOCK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                os.unlink(path.name, dir_fd=folder)


def default_socket_path(service: str) -> Path:
    """Return a path for a unix socket of this process.

    It is in the folder that systemd created for the unit, else in a private folder of this user, which is created if
    needed in the user's runtime folder or in the one for temporary files. Raises ConfigError if the folder belongs to
    another user or is open to others.
    """
    if given := os.environ.get(_UNIT_VARIABLE, "").partition(":")[0]:
        _check_folder(Path(given), private=False)
        return Path(given) / "links.sock"
    folder = _of_this_user()
    with suppress(OSError):  # the check below reports the problem
        folder.mkdir(mode=0o700)
    _check_folder(folder, private=True)
    return folder / f"{service}-{os.getpid()}.sock"


def open_folder(folder: Path, *, private: bool = False) -> int:
    """Open a folder in which only this user and root can create or replace anything. Return its descriptor.

    Raises ConfigError, which names the owner and what to do, and OSError if there is no such folder.

    Args:
        private: Whether the folder must also belong to this user and be unreadable for other users.
    """
    _refuse_links(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(folder, os.fstat(descriptor), private=private)
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def _check_folder(folder: Path, *, private: bool) -> None:
    try:
        os.close(open_folder(folder, private=private))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used for sockets of links: {error.strerror or error}") from None


def _of_this_user() -> Path:
    runtime = os.environ.get(_USER_VARIABLE, "")
    if runtime and Path(runtime).is_absolute():
        with suppress(OSError, ConfigError):  # a folder of another user's session, as after sudo, is not meant
            os.close(open_folder(Path(runtime), private=True))
            return Path(runtime) / "bottega"
    return Path(tempfile.gettempdir()) / f"bottega-{os.geteuid()}"


def _refuse_links(folder: Path) -> None:
    """Raise a clear error for a symbolic link or a file, because opening either would fail with the same text."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise ConfigError(
            f"{folder} is {what}, made by {user_name(found.st_uid)}: sockets of links lie in a real folder; "
            f"remove it, {_ELSEWHERE}"
        )


def _check(folder: Path, found: os.stat_result, *, private: bool) -> None:
    user = os.geteuid()
    if found.st_uid != user and (private or found.st_uid != _ROOT):
        raise ConfigError(
            f"{folder} belongs to {user_name(found.st_uid)}, and not to {user_name(user)}, who runs this: its owner "
            f"could take links over; have it removed, {_ELSEWHERE}"
        )
    open_to = stat.S_IMODE(found.st_mode) & (_OTHERS if private else _WRITERS)
    if open_to:
        rights = stat.S_IMODE(found.st_mode)
        what = "open to others" if private else "writable for others"
        raise ConfigError(
            f"{folder} is {what} (its mode is {rights:04o}), who could take links over: look who uses it, then "
            f"chmod {rights & ~open_to:04o} {folder}, {_ELSEWHERE}"
        )
