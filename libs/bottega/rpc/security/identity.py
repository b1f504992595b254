"""Who a certificate names: a role and a name, in its alternative names.

A certificate of Bottega's authority has the URI bottega://ROLE/NAME, by which a server knows its caller, and the DNS
names NAME.ROLE.bottega and ROLE.bottega, by which gRPC checks that a caller has reached whom it means. No certificate
names a host: services may move.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bottega.rpc.security.caller import Role

NAME_RULE = "1 to 63 of a-z, 0-9, - and ., of which neither - nor . is the first or the last"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_URI = re.compile(r"bottega://([a-z]+)/([a-z0-9.-]+)")
_DOMAIN = "bottega"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Of a service, a tenant or an operator. name: among those of its role; see NAME_RULE."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @property
    def uri(self) -> str:
        """By which its callers' servers know it."""
        return f"bottega://{self.role}/{self.name}"

    @property
    def dns_names(self) -> tuple[str, str]:
        """By which those who call it know it: its own, and that of its role."""
        return dns_name(self.role, self.name), dns_name(self.role)


def dns_name(role: str, name: str = "") -> str:
    """What the certificate of one that is called must have. name: empty is any of the role."""
    return ".".join(filter(None, (name, role, _DOMAIN)))


def is_name(name: str) -> bool:
    """Whether a certificate can have it; see NAME_RULE."""
    return _NAME.fullmatch(name) is not None


def identity_from(text: str) -> Identity | None:
    """The identity of "ROLE/NAME", as people write it; None for what is none."""
    role, _, name = text.partition("/")
    return Identity(role=Role(role), name=name) if role in set(Role) - {Role.LOCAL} and is_name(name) else None


def identity_in(uris: Iterable[str]) -> Identity | None:
    """Return the identity that a certificate has by its URIs; None where it has none, or several."""
    found = [match for uri in uris if (match := _URI.fullmatch(uri))]
    return identity_from(f"{found[0][1]}/{found[0][2]}") if len(found) == 1 else None
