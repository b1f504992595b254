"""Binds the configured addresses and paths of links, and no others."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import ConfigError
from bottega.transport.handshake.credentials import links_group
from bottega.transport.handshake.socket_folder import open_folder

# Callers of a unix socket that may wait; more are refused at once. See acceptor.MAX_PENDING_CONNECTIONS.
_BACKLOG = 256
# Size of sun_path in sockaddr_un, less its final zero.
_MAX_PATH_BYTES = 107
_PROBE_S = 0.2
_OWN_MODE = 0o600
_SHARED_MODE = 0o660


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The addresses at which a listener can be reached. Raises ValueError for a path that is too long."""

    tcp: tuple[str, int] | None = None
    """Host and port to bind, port 0 for any. Offers name the same host."""
    unix_path: Path | None = None
    """Path of the socket for this host. This user, root and the links' group (credentials.py) may use it."""
    seal: bool = True
    """Whether bytes over TCP are sealed. Links between devices of two hosts cannot be, so they are refused then."""

    def __post_init__(self) -> None:
        if self.unix_path is not None and len(os.fsencode(self.unix_path)) > _MAX_PATH_BYTES:
            raise ValueError(f"{self.unix_path} is over {_MAX_PATH_BYTES} bytes, too long for a unix socket")


def bind_tcp(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"links cannot listen on {host}:{port}: {error.strerror or error}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bind_unix(path: Path) -> socket.socket:
    """Return a listening socket for this user and the links' group, in place of one that a dead process left.

    Raises ConfigError, also if others could replace the socket.
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
