"""Credentials of a client: its certificates and its API key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bottega.client.transport.answers import BoundedChannels
from bottega.errors import ConfigError, InvalidRequest, Violation
from bottega.rpc.channel import Channels
from bottega.rpc.security.api_keys import parse_key
from bottega.rpc.security.tls import AuthorityFile, TlsConfig, TlsFiles

# In the order of Tls's fields.
VARIABLES = ("BOTTEGA_TLS_AUTHORITY", "BOTTEGA_TLS_CERTIFICATE", "BOTTEGA_TLS_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files of certificates, as `bottega certs` makes them."""

    authority: str | Path
    """File of the authority that must have signed the gateway's certificate."""
    certificate: str | Path | None = None
    """File of the client's certificate; None for a gateway that asks for an API key instead."""
    key: str | Path | None = None
    """File of the certificate's key."""


def tls_from_environment() -> Tls | None:
    """Return the files that BOTTEGA_TLS_AUTHORITY and the other variables name; None if none of them is set."""
    authority, certificate, key = (os.environ.get(name, "").strip() for name in VARIABLES)
    if not (authority or certificate or key):
        return None
    if not authority:
        raise _refusal(f"{VARIABLES[0]} is not set, and TLS needs an authority to trust")
    return Tls(authority=authority, certificate=certificate or None, key=key or None)


def channels_of(tls: Tls | None) -> Channels:
    """Return the factory of a client's channels. Raise InvalidRequest for files that cannot be used."""
    if tls is None:
        return BoundedChannels()
    if (tls.certificate is None) != (tls.key is None):
        raise _refusal("a certificate needs its key, and a key its certificate")
    try:
        if tls.certificate is None:
            return BoundedChannels(AuthorityFile(Path(tls.authority)))
        files = TlsConfig(certificate=str(tls.certificate), key=str(tls.key), authority=str(tls.authority))
        return BoundedChannels(TlsFiles(files))
    except ConfigError as error:
        raise _refusal(error.message) from None


def _refusal(rule: str) -> InvalidRequest:
    return InvalidRequest(f"tls: {rule}", violations=[Violation(field="tls", description=rule)])


KEY_VARIABLE = "BOTTEGA_API_KEY"


def default_key() -> str:
    """Return the API key of the environment; empty if there is none."""
    return os.environ.get(KEY_VARIABLE, "").strip()


def checked_key(key: str) -> str:
    """Return a valid key, or "" for none. Raise InvalidRequest for an invalid key, without showing it."""
    if key and parse_key(key) is None:
        rule = "must be btg_, 16 hexadecimal digits, _ and 64 more, as `bottega tenants add` shows it once"
        raise InvalidRequest(f"api_key: {rule}", violations=[Violation(field="api_key", description=rule)])
    return key
