"""A folder with an authority and the certificates that it signed, each with its key. `bottega certs` writes it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import ConfigError
from bottega.rpc.security.certificates import CertificatePair, facts_of, new_authority, new_certificate
from bottega.rpc.security.identity import Identity
from bottega.rpc.security.private_files import PUBLIC, read_private, read_public, write_file
from bottega.state_folder import make_missing

_AUTHORITY = "authority"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePaths:
    """The paths of a certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCertificate:
    """A certificate in the folder."""

    identity: Identity
    expires_wall: float
    """Unix time in seconds."""
    paths: CertificatePaths


class CertificateFolder:
    """A folder of certificates. Every method raises ConfigError if a file cannot be read or written, or is invalid."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority_path = folder / f"{_AUTHORITY}.pem"
        self.authority_key_path = folder / f"{_AUTHORITY}.key"

    @property
    def has_authority(self) -> bool:
        """Whether the folder has an authority."""
        return self.authority_path.exists()

    @property
    def authority_expires_wall(self) -> float:
        """When the authority's certificate expires, as Unix time in seconds."""
        return facts_of(read_public(self.authority_path), source=str(self.authority_path)).expires_wall

    def make_authority(self, *, days: int) -> None:
        """Create an authority in a folder that has none."""
        with self._writing():
            make_missing(self._folder)
            paths = CertificatePaths(certificate=self.authority_path, key=self.authority_key_path)
            _write(new_authority(days=days), paths)

    def issue(self, identity: Identity, *, days: int) -> CertificatePaths:
        """Create a certificate, which replaces an existing one, and return its paths."""
        authority = CertificatePair(
            certificate=read_public(self.authority_path), key=read_private(self.authority_key_path)
        )
        paths = self._paths(identity)
        with self._writing(), self._locked():
            _write(new_certificate(authority, identity, days=days), paths)
        return paths

    def find(self, identity: Identity) -> FoundCertificate | None:
        """Return the certificate of an identity, or None."""
        paths = self._paths(identity)
        return self._found(paths.certificate) if paths.certificate.exists() else None

    def certificates(self) -> Sequence[FoundCertificate]:
        """Return all certificates except the authority's, sorted by name."""
        paths = [path for path in sorted(self._folder.glob("*.pem")) if path != self.authority_path]
        return [found for path in paths if (found := self._found(path)) is not None]

    def _found(self, path: Path) -> FoundCertificate | None:
        facts = facts_of(read_public(path), source=str(path))
        if facts.identity is None:
            return None
        return FoundCertificate(
            identity=facts.identity, expires_wall=facts.expires_wall, paths=self._paths(facts.identity)
        )

    def _paths(self, identity: Identity) -> CertificatePaths:
        stem = f"{identity.role}-{identity.name}"
        return CertificatePaths(certificate=self._folder / f"{stem}.pem", key=self._folder / f"{stem}.key")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be written: {error.strerror}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self._folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _write(pair: CertificatePair, paths: CertificatePaths) -> None:
    """Write the key first: a process that reads between the two writes keeps using the old pair."""
    write_file(paths.key, pair.key)
    write_file(paths.certificate, pair.certificate, PUBLIC)
