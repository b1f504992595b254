"""Finds out whether a port expects TLS, to explain connections of which only one end uses it.

gRPC reports such a connection as one that nobody answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from bottega.errors import ConfigError

# A port of this suite answers a greeting within milliseconds.
_ANSWER_S = 1.0
# First bytes of TLS records: an alert, and a handshake message. The second byte is the major version.
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")


async def find_tls_mismatch(address: str, *, encrypted: bool) -> str:
    """Return a sentence if only one of the port and the caller uses TLS; else an empty text.

    Args:
        address: host:port; anything else is not checked.
        encrypted: Whether the caller uses TLS.
    """
    expected = await _expects_tls(address)
    if expected is None or expected == encrypted:
        return ""
    if expected:
        return f"the server at {address} expects TLS, and this end does not use it"
    return f"the server at {address} does not use TLS, and this end does"


async def _expects_tls(address: str) -> bool | None:
    """Return whether a port answers a TLS handshake with TLS; None if it does not answer."""
    from bottega.rpc.address import split  # it imports pydantic, which takes long

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
