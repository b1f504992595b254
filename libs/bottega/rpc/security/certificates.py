"""Creates, reads and checks certificates of Bottega's own authority, and keeps them in a folder for `bottega certs`."""

from __future__ import annotations

import datetime as dt
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bottega.errors import ConfigError
from bottega.rpc.security.caller import Identity, identity_in
from bottega.rpc.security.private_files import PUBLIC, read_private, read_public, write_file
from bottega.state_folder import make_missing

_AUTHORITY_FILE = "authority"
# Certificates are valid a little earlier, since the clocks of a fleet differ.
_BEFORE = dt.timedelta(minutes=5)
_AUTHORITY = "Bottega"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """The contents of a certificate."""

    identity: Identity | None
    """Identity in the certificate; None for the authority's own certificate."""
    begins_wall: float
    """Start of its validity, in Unix seconds."""
    expires_wall: float
    """End of its validity, in Unix seconds."""
    issuer: str


def new_authority(*, days: int) -> CertificatePair:
    """Create the certificate and key of a new authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{_AUTHORITY} authority")])
    builder = _begun(name, name, key.public_key(), days=days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return _signed(builder, key, key)


def new_certificate(authority: CertificatePair, identity: Identity, *, days: int) -> CertificatePair:
    """Create a certificate with which an identity may serve and call. It expires no later than its authority.

    Raises ConfigError if the authority is not valid.
    """
    issuer = _loaded(authority.certificate, source="the authority's certificate")
    issuer_key = _loaded_key(authority.key, source="the authority's key")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity))])
    builder = _begun(name, issuer.subject, key.public_key(), days=days, latest=issuer.not_valid_after_utc)
    names = [x509.UniformResourceIdentifier(identity.uri), *map(x509.DNSName, identity.dns_names)]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = builder.add_extension(of_issuer, critical=False)
    return _signed(builder, key, issuer_key)


def facts_of(certificate: bytes, *, source: str) -> CertificateFacts:
    """Parse the first certificate in a PEM file. Raises ConfigError, which names `source`."""
    loaded = _loaded(certificate, source=source)
    try:
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identity = identity_in(names.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        identity = None
    return CertificateFacts(
        identity=identity,
        begins_wall=loaded.not_valid_before_utc.timestamp(),
        expires_wall=loaded.not_valid_after_utc.timestamp(),
        issuer=loaded.issuer.rfc4514_string(),
    )


def check_pair(pair: CertificatePair, authority: bytes, *, source: str) -> None:
    """Raise ConfigError if a key does not belong to its certificate, or the authority has not signed the latter."""
    certificate = _loaded(pair.certificate, source=source)
    key = _loaded_key(pair.key, source=f"the key of {source}")
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"the key does not belong to the certificate {source}")
    chain = x509.load_pem_x509_certificates(pair.certificate)
    roots = x509.load_pem_x509_certificates(authority)
    if not any(_issued(chain[-1], root) for root in roots):
        raise ConfigError(f"{source} is not signed by the configured authority")


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    *,
    days: int,
    latest: dt.datetime | None = None,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    end = now + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(min(end, latest) if latest else end)
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, issuer_key: ec.EllipticCurvePrivateKey
) -> CertificatePair:
    certificate = builder.sign(issuer_key, hashes.SHA256())
    return CertificatePair(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _loaded(certificate: bytes, *, source: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate)
    except ValueError:
        raise ConfigError(f"{source} is not a PEM certificate") from None


def _loaded_key(key: bytes, *, source: str) -> ec.EllipticCurvePrivateKey:
    try:
        loaded = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError):
        raise ConfigError(f"{source} is not a PEM key without a password") from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{source} has the wrong type of key: `bottega certs` makes EC keys")
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePaths:
    """The paths of a certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCertificate:
    """A certificate in a CertificateFolder."""

    identity: Identity
    expires_wall: float
    """End of its validity, in Unix seconds."""
    paths: CertificatePaths


class CertificateFolder:
    """A folder of certificates. Every method raises ConfigError if a file cannot be read or written, or is invalid."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority_path = folder / f"{_AUTHORITY_FILE}.pem"
        self.authority_key_path = folder / f"{_AUTHORITY_FILE}.key"

    @property
    def has_authority(self) -> bool:
        """Whether the folder has an authority."""
        return self.authority_path.exists()

    @property
    def authority_expires_wall(self) -> float:
        """End of the validity of the authority's certificate, in Unix seconds."""
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
    write_file(paths.key, pair.key)
    write_file(paths.certificate, pair.certificate, PUBLIC)
