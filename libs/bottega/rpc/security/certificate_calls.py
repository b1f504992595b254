"""Authenticates callers by the certificates of their connections."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.errors import Unauthenticated
from bottega.rpc.security.caller import Caller, Metadata, Role
from bottega.rpc.security.identity import identity_in

_NOBODY = "the certificate names nobody whom this service knows: bottega certs issue ROLE/NAME makes one that does"


class CertificateAuthenticator:
    """A CallAuthenticator for listeners that require client certificates."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return the caller that the certificate names. Raises Unauthenticated."""
        del metadata
        known = caller_in(identities)
        if known is None:
            raise Unauthenticated(_NOBODY)
        return known


def caller_in(identities: Sequence[str]) -> Caller | None:
    """Return the caller that a certificate names by its URIs, or None."""
    identity = identity_in(identities)
    if identity is None:
        return None
    tenant = identity.name if identity.role is Role.TENANT else ""
    return Caller(role=identity.role, name=identity.name, tenant=tenant)
