"""Checks how this client and its gateway know each other, and for how long their certificates are good."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from bottega.client.transport.tls import Tls, tls_from_environment
from bottega.client.types.checks import CheckResult, fail, ok, warn
from bottega.errors import BottegaError
from bottega.rpc.address import is_loopback, split
from bottega.rpc.security.caller import Role
from bottega.rpc.security.identity import dns_name

_ANSWER_S = 2.0
_DAY_S = 86_400.0
_SOON_DAYS = 14
_RENEW = "bottega certs renew makes a new one; services use it within a second."


def check_certificates(address: str) -> Iterator[CheckResult]:
    """Of the gateway that answers at host:port, and this client's own."""
    tls = tls_from_environment()
    if tls is None:
        if not is_loopback(address):
            yield warn(
                f"calls to {address} are in plain text, and whoever is there is believed",
                "bottega certs makes certificates; BOTTEGA_TLS_AUTHORITY and the others name them.",
            )
        return
    try:
        yield _validity("the gateway's certificate", _shown_at(address, tls))
        if tls.certificate is not None:
            yield _validity("this client's certificate", Path(tls.certificate).read_bytes())
    except (OSError, ssl.SSLError, BottegaError) as error:
        todo = "Are they of one authority? bottega certs show lists what it has signed."
        yield fail(f"the certificates cannot be looked at: {error}", todo)


def _shown_at(address: str, tls: Tls) -> bytes:
    """The gateway's certificate, in PEM, which the authority has signed."""
    context = ssl.create_default_context(cafile=str(tls.authority))
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None and tls.key is not None:
        context.load_cert_chain(str(tls.certificate), str(tls.key))
    with (
        socket.create_connection(split(address), timeout=_ANSWER_S) as connection,
        context.wrap_socket(connection, server_hostname=dns_name(Role.GATEWAY)) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None, "the context asks for one"
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _validity(what: str, certificate: bytes) -> CheckResult:
    from bottega.rpc.security.certificates import facts_of

    facts = facts_of(certificate, source=what)
    days = (facts.expires_wall - time.time()) / _DAY_S
    named = f"{what}, of {facts.identity}," if facts.identity else f"{what}"
    if days < 0:
        return fail(f"{named} has expired", _RENEW)
    said = f"{named} expires in {days:.0f} days"
    return warn(said, _RENEW) if days < _SOON_DAYS else ok(said)
