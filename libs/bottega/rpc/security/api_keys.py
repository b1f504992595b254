"""API keys: how they are made, what is kept of them, and how one is recognized.

A key is `btg_ID_SECRET`: the ID finds its entry and is no secret; the secret is 256 random bits. What is kept is its
BLAKE2b: the slow hashes are for passwords, which can be guessed; 256 random bits cannot, and each call pays for the
hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

_PREFIX = "btg"
_ID_BYTES, _SECRET_BYTES = 8, 32
_KEY = re.compile(r"btg_([0-9a-f]{16})_([0-9a-f]{64})", re.ASCII)
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyParts:
    """A key that somebody shows."""

    key_id: str
    secret: str


def new_key() -> tuple[str, KeyParts]:
    """A key for its owner, and its parts. It is nowhere else: what is kept of it does not give it back."""
    parts = KeyParts(key_id=secrets.token_hex(_ID_BYTES), secret=secrets.token_hex(_SECRET_BYTES))
    return f"{_PREFIX}_{parts.key_id}_{parts.secret}", parts


def parse_key(key: str) -> KeyParts | None:
    """Its parts; None for what is no key."""
    found = _KEY.fullmatch(key)
    return KeyParts(key_id=found[1], secret=found[2]) if found else None


def hashed(secret: str) -> str:
    """What is kept of a secret, 64 hex digits."""
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"bottega-api-key").hexdigest()


def matches(secret: str, kept: str) -> bool:
    """Whether the secret is the one of which that was kept. Takes the same time whatever is wrong with it."""
    return hmac.compare_digest(hashed(secret), kept)


def bearer(key: str) -> tuple[str, str]:
    """The metadata of a call that shows the key."""
    return "authorization", f"Bearer {key}"


def shown_key(value: str) -> str:
    """The key of a value of `authorization`; empty where it is of another scheme."""
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else ""
