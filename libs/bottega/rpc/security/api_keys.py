"""Creates and checks API keys.

A key is `btg_ID_SECRET`. The ID, which is not secret, finds the stored entry. The secret has 256 random bits, of which
the BLAKE2b hash is stored. Slow hashes are for passwords, which can be guessed; 256 random bits cannot, and each call
needs the hash.
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
    """The two parts of an API key."""

    key_id: str
    secret: str


def new_key() -> tuple[str, KeyParts]:
    """Create a key. Return it for its owner, and its parts. The key cannot be restored from what is stored."""
    parts = KeyParts(key_id=secrets.token_hex(_ID_BYTES), secret=secrets.token_hex(_SECRET_BYTES))
    return f"{_PREFIX}_{parts.key_id}_{parts.secret}", parts


def parse_key(key: str) -> KeyParts | None:
    """Split a key into its parts; return None if the text is not a key."""
    found = _KEY.fullmatch(key)
    return KeyParts(key_id=found[1], secret=found[2]) if found else None


def hashed(secret: str) -> str:
    """Return the hash of a secret to store: 64 hexadecimal digits."""
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"bottega-api-key").hexdigest()


def matches(secret: str, stored: str) -> bool:
    """Return whether a secret has the stored hash, in constant time."""
    return hmac.compare_digest(hashed(secret), stored)


def bearer(key: str) -> tuple[str, str]:
    """Return the metadata entry for calls with the key."""
    return "authorization", f"Bearer {key}"


def shown_key(value: str) -> str:
    """Return the key in a value of `authorization`; "" if the value has another scheme."""
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else ""
