"""The identity in a certificate: a role and a name, in its alternative names.

A certificate of Bottega's authority has the URI bottega://ROLE/NAME, by which a server identifies its caller, and the
DNS names NAME.ROLE.bottega and ROLE.bottega, by which gRPC checks that it reached the right service. Certificates have
no host names, because services may move.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bottega.rpc.security.caller import Role

NAME_RULE = "1 to 63 of a-z, 0-9, - and ., with neither - nor . at the beginning or end"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_URI = re.compile(r"bottega://([a-z]+)/([a-z0-9.-]+)")
_DOMAIN = "bottega"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of a service, a tenant or an operator."""

    role: Role
    name: str
    """Name, unique within the role; see NAME_RULE."""

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @property
    def uri(self) -> str:
        """The URI by which servers identify it as a caller."""
        return f"bottega://{self.role}/{self.name}"

    @property
    def dns_names(self) -> tuple[str, str]:
        """The names by which its callers identify it: its own, and that of its role."""
        return dns_name(self.role, self.name), dns_name(self.role)


def dns_name(role: str, name: str = "") -> str:
    """Return the DNS name that a server's certificate must have.

    Args:
        name: Name of the server; empty is any of the role.
    """
    return ".".join(filter(None, (name, role, _DOMAIN)))


def is_name(name: str) -> bool:
    """Return whether an identity can have the name; see NAME_RULE."""
    return _NAME.fullmatch(name) is not None


def identity_from(text: str) -> Identity | None:
    """Return the identity of "ROLE/NAME", or None if the text is none."""
    role, _, name = text.partition("/")
    return Identity(role=Role(role), name=name) if role in set(Role) - {Role.LOCAL} and is_name(name) else None


def identity_in(uris: Iterable[str]) -> Identity | None:
    """Return the identity in a certificate's URIs, or None if there is not exactly one."""
    found = [match for uri in uris if (match := _URI.fullmatch(uri))]
    return identity_from(f"{found[0][1]}/{found[0][2]}") if len(found) == 1 else None
