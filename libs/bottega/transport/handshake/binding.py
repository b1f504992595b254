"""Where links listen: the addresses and paths of the configuration, bound and nothing else."""

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

# Of a unix socket's callers who cannot wait: beyond it they are refused at once. See acceptor.MAX_PENDING_CONNECTIONS.
_BACKLOG = 256
# sun_path of sockaddr_un, with its final zero.
_MAX_PATH_BYTES = 107
_PROBE_S = 0.2
_OWN_MODE = 0o600
_SHARED_MODE = 0o660


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a listener is to be found; a process always finds its own.

    tcp: host and port to bind, port 0 for any; others are told the same host. unix_path: of the socket for this host,
    which is for this user and root, and for the links' group where there is one (credentials.py). seal: whether what
    comes by TCP is sealed; links between devices of two hosts, which cannot be, are not made then.
    Raises ValueError for a path that is too long.
    """

    tcp: tuple[str, int] | None = None
    unix_path: Path | None = None
    seal: bool = True

    def __post_init__(self) -> None:
        if self.unix_path is not None and len(os.fsencode(self.unix_path)) > _MAX_PATH_BYTES:
            raise ValueError(f"{self.unix_path} is over {_MAX_PATH_BYTES} bytes, too long for a unix socket")


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"links cannot listen on {host}:{port}: {error.strerror or error}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bind_unix(path: Path) -> socket.socket:
    """A listening socket, for this user and for the links' group; one that a dead process left there is replaced.

    Raises ConfigError, also where others could put a socket in its place.
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
        # In the folder that was looked at, in which nobody else makes anything: so it is the one that was just bound.
        made = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if group is not None and made.st_gid != group:
            os.chown(path.name, -1, group, dir_fd=folder)
        # Before it listens, so that nobody comes in meanwhile.
        os.chmod(path.name, _OWN_MODE if group is None else _SHARED_MODE, dir_fd=folder)
        bound.listen(_BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


def _remove_left_over(path: Path, folder: int) -> None:
    """Removes the socket of a process that died; one that somebody listens on stays, and binding then fails."""
    with suppress(OSError):
        if not stat.S_ISSOCK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                os.unlink(path.name, dir_fd=folder)
