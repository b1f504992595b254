"""Page tokens of job lists. A token is encrypted for one tenant and names the last job of the previous page.

It is encrypted because the job's sequence number would show how many jobs all tenants have.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bottega.errors import InvalidRequest, Violation

_KEY_BYTES = 32
_NONCE_BYTES = 12
# A nonce, 8 bytes of the sequence and a tag of 16 bytes, in base64.
_TOKEN_CHARACTERS = 48


class PageTokens:
    """Creates and reads page tokens. Tokens stay valid after a restart as long as the key file exists.

    Args:
        key_file: File of the encryption key. It is written when the first token is created.
    """

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file
        self._cipher: AESGCM | None = None

    def use(self, key: bytes) -> None:
        """Use this key of 32 bytes, not that of the file."""
        self._cipher = AESGCM(key)

    def token_of(self, sequence: int, *, tenant: str) -> str:
        """Return a tenant's token for the page that starts after the job with this sequence number."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._opened().encrypt(nonce, sequence.to_bytes(8, "big"), tenant.encode())
        return base64.urlsafe_b64encode(nonce + sealed).decode()

    def sequence_of(self, token: str, *, tenant: str) -> int:
        """Return the sequence number in a token. Raise InvalidRequest if the token was not made for the tenant."""
        if len(token) == _TOKEN_CHARACTERS:
            with contextlib.suppress(binascii.Error, ValueError, InvalidTag):
                raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
                sequence = self._opened().decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], tenant.encode())
                return int.from_bytes(sequence, "big")
        rule = "must be the next_page_token of an earlier answer"
        raise InvalidRequest(f"page_token: {rule}", violations=[Violation(field="page_token", description=rule)])

    def _opened(self) -> AESGCM:
        if self._cipher is None:
            self._cipher = AESGCM(_key_in(self._key_file))
        return self._cipher


def _key_in(path: Path) -> bytes:
    """Return the key in a file, or a new key. A new key that cannot be written is lost when this process ends."""
    with contextlib.suppress(OSError):
        key = path.read_bytes()
        if len(key) == _KEY_BYTES:
            return key
    key = os.urandom(_KEY_BYTES)
    temporary = path.with_name(f"{path.name}.new")
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        temporary.replace(path)
    return key
