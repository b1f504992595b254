"""Where links listen: the addresses and paths of the configuration, bound and nothing else. It knows no link."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import ConfigError

# Of a unix socket's callers who cannot wait: beyond it they are refused at once. See door.MAX_STRANGERS.
_BACKLOG = 256
# sun_path of sockaddr_un, with its final zero.
_MAX_PATH_BYTES = 107
_PROBE_S = 0.2
# The folder that systemd makes for a unit's sockets, which other units can see.
_RUNTIME_VARIABLE = "RUNTIME_DIRECTORY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Where a listener is to be found; a process always finds its own.

    tcp: host and port to bind, port 0 for any; others are told the same host. unix_path: of the socket for this host.
    unix_mode: its permissions: others of the socket's group need 0o660. Raises ValueError for a path that is too long.
    """

    tcp: tuple[str, int] | None = None
    unix_path: Path | None = None
    unix_mode: int = 0o600

    def __post_init__(self) -> None:
        if self.unix_path is not None and len(os.fsencode(self.unix_path)) > _MAX_PATH_BYTES:
            raise ValueError(f"{self.unix_path} is over {_MAX_PATH_BYTES} bytes, too long for a unix socket")


def own_socket(service: str) -> Path:
    """A path for a unix socket of this process: in the folder that systemd made for its unit, else in one of this
    user's for temporary files, which is made."""
    if given := os.environ.get(_RUNTIME_VARIABLE, "").partition(":")[0]:
        return Path(given) / "links.sock"
    folder = Path(tempfile.gettempdir()) / f"bottega-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{service}-{os.getpid()}.sock"


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"links cannot listen on {host}:{port}: {error.strerror or error}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bind_unix(path: Path, mode: int) -> socket.socket:
    """A listening socket; one that a dead process left there is replaced. Raises ConfigError."""
    _remove_left_over(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        path.chmod(mode)  # before it listens, so that nobody comes in meanwhile
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"links cannot listen on {path}: {error.strerror or error}") from None
    return bound


def _remove_left_over(path: Path) -> None:
    """Removes the socket of a process that died; one that somebody listens on stays, and binding then fails."""
    with suppress(OSError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
