"""TLS of a process: its certificate, its key, and the authority that it trusts; and whether a port expects TLS.

The files are checked when they are used, so that new connections use renewed files without a restart. If new files
cannot be used, the process keeps using the old ones.

If only one end of a connection uses TLS, gRPC reports the other end as unreachable, so the port is probed to explain
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc

from bottega.errors import ConfigError
from bottega.rpc.address import split, split_list
from bottega.rpc.security.caller import Identity
from bottega.rpc.security.private_files import FileState, file_state, read_private, read_public
from bottega.strict import STRICT

# Seconds to wait for an answer. A port of this suite answers within milliseconds.
_ANSWER_S = 1.0
# First bytes of TLS records: an alert, and a handshake message. The second byte is the major version.
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
# Seconds between two checks of the files, which take microseconds.
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files of a process for TLS: all three or none. `bottega certs` creates them."""

    __pydantic_config__: ClassVar[Any] = STRICT

    certificate: str = ""
    """Certificate of the process, followed by intermediate certificates, if there are any."""
    key: str = ""
    """Private key of the certificate. Only the user of the service and root may be able to read it."""
    authority: str = ""
    """Certificate of the authority whose certificates are trusted."""

    def __post_init__(self) -> None:
        missing = [name for name in ("certificate", "key", "authority") if not getattr(self, name)]
        if 0 < len(missing) < 3:
            raise ValueError(f"{' and '.join(missing)} must be set too: TLS needs all three files")

    @property
    def given(self) -> bool:
        """Whether TLS is configured."""
        return bool(self.certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """The contents of the TLS files."""

    certificate: bytes
    """Certificate of the process, in PEM."""
    key: bytes
    """Key of the certificate, in PEM."""
    authority: bytes
    """Trusted certificates, in PEM."""
    identity: Identity
    """The identity in the certificate."""
    expires_wall: float
    """End of the certificate's validity, in Unix seconds."""


class TlsFiles:
    """The TLS files of a process. Any thread may use it. The constructor raises ConfigError."""

    def __init__(self, config: TlsConfig) -> None:
        self._paths = [Path(path).expanduser() for path in (config.certificate, config.key, config.authority)]
        self._lock = threading.Lock()
        self._states = self._states_now()
        self._material = self._read()
        self._looked_at = time.monotonic()

    @property
    def material(self) -> TlsMaterial:
        """Contents of the files, at most a second old."""
        with self._lock:
            if time.monotonic() - self._looked_at >= _LOOK_S:
                self._looked_at = time.monotonic()
                self._look()
            return self._material

    def server_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """Return credentials for a listener. New connections use the current files.

        Args:
            client_certificates: Whether clients must have a certificate that the authority signed.
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
            changed,  # type: ignore[arg-type]  # None is "as before", which is missing in its types
            require_client_authentication=client_certificates,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a channel that is opened now."""
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
            _log.error("new certificates cannot be used; the previous ones stay in use", extra={"text": error.message})
        else:
            _log.info("the certificates were read again", extra={"certificate": str(self._paths[0])})

    def _states_now(self) -> list[FileState]:
        return [file_state(path) for path in self._paths]

    def _read(self) -> TlsMaterial:
        # Imported only here: it takes megabytes, and most processes on a developer's machine have no certificates.
        from bottega.rpc.security.certificates import CertificatePair, check_pair, facts_of

        certificate, key, authority = self._paths
        pair = CertificatePair(certificate=read_public(certificate), key=read_private(key))
        trusted, source = read_public(authority), str(certificate)
        check_pair(pair, trusted, source=source)
        facts = facts_of(pair.certificate, source=source)
        if facts.identity is None:
            raise ConfigError(
                f"{certificate} has no identity (a URI bottega://ROLE/NAME); create one with bottega certs issue"
            )
        return TlsMaterial(
            certificate=pair.certificate,
            key=pair.key,
            authority=trusted,
            identity=facts.identity,
            expires_wall=facts.expires_wall,
        )


class AuthorityFile:
    """The authority that a client without a certificate of its own trusts. The constructor raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._authority = read_public(path.expanduser())

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a channel that is opened now."""
        return grpc.ssl_channel_credentials(self._authority)


def _server_configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.authority)


async def find_tls_mismatch(address: str, *, encrypted: bool) -> str:
    """Explain if the port uses TLS and the caller does not, or the reverse; return "" if they agree.

    Args:
        address: host:port, or a list of them (rpc.address), of which the first that disagrees counts; anything else is
            not checked.
        encrypted: Whether the caller uses TLS.
    """
    for one in split_list(address):
        expected = await _expects_tls(one)
        if expected is None or expected == encrypted:
            continue
        if expected:
            return f"the server at {one} expects TLS, but this client does not use it"
        return f"the server at {one} does not use TLS, but this client does"
    return ""


async def _expects_tls(address: str) -> bool | None:
    """Return whether a port answers a TLS handshake with TLS; None if it does not answer."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    try:
        host, port = split(address)
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
            try:
                writer.write(outgoing.read())
                answer = await reader.readexactly(2)
            finally:
                writer.close()
    except (ConfigError, OSError, TimeoutError, asyncio.IncompleteReadError):
        return None
    return answer in _TLS_RECORDS
