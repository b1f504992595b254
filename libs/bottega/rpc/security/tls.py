"""What a process shows to those it meets, and whom it believes: its certificate, its key, and the authority's.

The files are looked at when they are used, so that renewed ones count without a restart: every new connection has
what is in them then. Files that cannot be used change nothing: those that were read before stay.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc

from bottega.errors import ConfigError
from bottega.rpc.security.identity import Identity
from bottega.rpc.security.private_files import FileState, file_state, read_private, read_public
from bottega.strict import STRICT

# Between two looks at the files, which take microseconds.
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files of a process for TLS: all three or none. `bottega certs` makes them."""

    __pydantic_config__: ClassVar[Any] = STRICT

    certificate: str = ""
    """Certificate of the process, followed by the intermediate ones, if any."""
    key: str = ""
    """Private key of the certificate. Only the user of the service and root may be able to read it."""
    authority: str = ""
    """Certificate of the authority whose certificates are trusted."""

    def __post_init__(self) -> None:
        missing = [name for name in ("certificate", "key", "authority") if not getattr(self, name)]
        if 0 < len(missing) < 3:
            raise ValueError(f"{' and '.join(missing)} must be given too: TLS needs all three files")

    @property
    def given(self) -> bool:
        """Whether there is to be TLS."""
        return bool(self.certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """What was in the files. certificate, key: of the process, in PEM. authority: certificates that are believed.

    identity: whom the certificate names. expires_wall: of it, Unix seconds.
    """

    certificate: bytes
    key: bytes
    authority: bytes
    identity: Identity
    expires_wall: float


class TlsFiles:
    """The files of one process, as they are now. Any thread may ask. Raises ConfigError when it is made."""

    def __init__(self, config: TlsConfig) -> None:
        self._paths = [Path(path).expanduser() for path in (config.certificate, config.key, config.authority)]
        self._lock = threading.Lock()
        self._states = self._states_now()
        self._material = self._read()
        self._looked_at = time.monotonic()

    @property
    def material(self) -> TlsMaterial:
        """Of the files as they were within the last second."""
        with self._lock:
            if time.monotonic() - self._looked_at >= _LOOK_S:
                self._looked_at = time.monotonic()
                self._look()
            return self._material

    def server_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """For a listener; new connections have what is in the files then.

        client_certificates: whether those who connect must show one of the authority's.
        """
        last = [self.material]

        def changed() -> grpc.ServerCertificateConfiguration | None:
            now = self.material
            if now is last[0]:
                return None
            last[0] = now
            return _server_configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(last[0]),
            changed,  # type: ignore[arg-type]  # None is "as before", which its types leave out
            require_client_authentication=client_certificates,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel that is opened now."""
        now = self.material
        return grpc.ssl_channel_credentials(now.authority, now.key, now.certificate)

    def _look(self) -> None:
        states = self._states_now()
        if states == self._states:
            return
        self._states = states
        try:
            self._material = self._read()
        except ConfigError as error:
            _log.error("new certificates cannot be used; those before stay", extra={"text": error.message})
        else:
            _log.info("the certificates were read again", extra={"certificate": str(self._paths[0])})

    def _states_now(self) -> list[FileState]:
        return [file_state(path) for path in self._paths]

    def _read(self) -> TlsMaterial:
        # Not before it is needed: it takes megabytes, and most processes on a developer's machine have no certificates.
        from bottega.rpc.security.certificates import CertificatePair, check_pair, facts_of

        certificate, key, authority = self._paths
        pair = CertificatePair(certificate=read_public(certificate), key=read_private(key))
        believed, source = read_public(authority), str(certificate)
        check_pair(pair, believed, source=source)
        facts = facts_of(pair.certificate, source=source)
        if facts.identity is None:
            raise ConfigError(f"{certificate} names nobody: it has no bottega://ROLE/NAME; see bottega certs issue")
        return TlsMaterial(
            certificate=pair.certificate,
            key=pair.key,
            authority=believed,
            identity=facts.identity,
            expires_wall=facts.expires_wall,
        )


class AuthorityFile:
    """Whom a client believes that shows no certificate of its own. Raises ConfigError when it is made."""

    def __init__(self, path: Path) -> None:
        self._authority = read_public(path.expanduser())

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel that is opened now."""
        return grpc.ssl_channel_credentials(self._authority)


def _server_configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.authority)
