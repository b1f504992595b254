"""The handshake: how the two ends of a connection prove to each other that they have the same offer's token.

All functions take and return plain bytes. The connecting end sends a request, the listener answers with a challenge and
its own proof, the connecting end sends its proof, and the listener answers with a verdict. A proof is an HMAC-SHA-256
of the end's role, the request and the listener's nonce, so none fits another connection, direction, epoch, end or set
of limits. The request says whether the connection is sealed, with keys made of the token and both nonces; within a host
it is not.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bottega.errors import AuthFailed, BadFrame, StaleEpoch
from bottega.transport.backends.records import SealKeys
from bottega.transport.channel.backend import Backend
from bottega.transport.channel.limits import Limits
from bottega.transport.handshake.offer import MAX_EPOCH, Offer

_MAGIC = b"btg2"
_NONCE_BYTES = 32
_KEY_BYTES = 32
_SEAL = b"bottega link seal 1 "
_REQUEST = struct.Struct("<4sBBB16sQIQI32s")
_CHALLENGE = struct.Struct("<4sB32s32s")

REQUEST_BYTES = _REQUEST.size
CHALLENGE_BYTES = _CHALLENGE.size
PROOF_BYTES = 32
WELCOME_BYTES = 1

# The index of a backend is its number in a request.
_BACKENDS = (Backend.MEMFD, Backend.TCP, Backend.CUDA_IPC, Backend.NCCL, Backend.GLOO)


class Direction(IntEnum):
    """The direction of a connection: which end sends on it."""

    CONNECTOR_SENDS = 0
    LISTENER_SENDS = 1


class Verdict(IntEnum):
    """The listener's answer to a request, and to a proof."""

    WELCOME = 0
    REFUSED = 1
    STALE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeRequest:
    """The decoded first message of a connection. Its fields are not trusted until the sender has proved its token."""

    backend: Backend
    direction: Direction
    sealed: bool
    """Whether the connection will be sealed."""
    link_id: str
    epoch: int
    limits: Limits
    encoded: bytes
    """The bytes of the request as they were received."""
    answer: bytes = b""
    """The challenge that the listener sent in reply; b"" until then."""


def handshake_request(offer: Offer, backend: Backend, direction: Direction, limits: Limits, *, sealed: bool) -> bytes:
    """Return the first bytes to send on a connection.

    Args:
        limits: Limits on the messages that the connecting end receives.
        sealed: Whether the connection will be encrypted.
    """
    return _REQUEST.pack(
        _MAGIC,
        _BACKENDS.index(backend),
        direction,
        sealed,
        bytes.fromhex(offer.link_id),
        offer.epoch,
        limits.slots,
        limits.slot_bytes,
        limits.layouts,
        secrets.token_bytes(_NONCE_BYTES),
    )


def parse_request(encoded: bytes) -> HandshakeRequest:
    """Parse the request of an unproven peer. Raises BadFrame if the bytes are not a request."""
    magic, backend, direction, sealed, link_id, epoch, slots, slot_bytes, layouts, _ = _REQUEST.unpack(encoded)
    known = backend < len(_BACKENDS) and direction in set(Direction) and sealed in (0, 1)
    if magic != _MAGIC or not known or epoch > MAX_EPOCH:
        raise BadFrame("a process connected and sent bytes that are not a link handshake")
    try:
        limits = Limits(slots=slots, slot_bytes=slot_bytes, layouts=layouts)
    except ValueError as error:
        raise BadFrame(f"a process connected with limits that no link has: {error}") from error
    return HandshakeRequest(
        backend=_BACKENDS[backend],
        direction=Direction(direction),
        sealed=bool(sealed),
        link_id=link_id.hex(),
        epoch=epoch,
        limits=limits,
        encoded=encoded,
    )


def challenge(token: bytes, encoded: bytes) -> tuple[bytes, bytes]:
    """Return the listener's answer to a request, and the proof that the peer must send."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    answer = _CHALLENGE.pack(_MAGIC, Verdict.WELCOME, nonce, _proof(token, b"listener", encoded, nonce))
    return answer, _proof(token, b"connector", encoded, nonce)


def refusal(verdict: Verdict) -> bytes:
    """Return the listener's answer to a request that it refuses."""
    return _CHALLENGE.pack(_MAGIC, verdict, bytes(_NONCE_BYTES), bytes(PROOF_BYTES))


def answer_challenge(token: bytes, encoded: bytes, answer: bytes) -> bytes:
    """Check the listener's proof, and return the proof of the connecting end. Raises AuthFailed, StaleEpoch."""
    magic, verdict, nonce, proof = _CHALLENGE.unpack(answer)
    if magic != _MAGIC:
        raise AuthFailed("the process at that address is not a link listener")
    check_verdict(verdict)
    if not hmac.compare_digest(proof, _proof(token, b"listener", encoded, nonce)):
        raise AuthFailed("the listener does not know the offer's token")
    return _proof(token, b"connector", encoded, nonce)


def seal_keys(token: bytes, encoded: bytes, answer: bytes, *, connecting: bool) -> SealKeys:
    """Return the keys of a connection for one of its ends. Source: HKDF, RFC 5869.

    Args:
        encoded: The connection's request, whose nonce makes the keys unique.
        answer: Its challenge, which contains the other nonce.
    """
    salt = hashlib.sha256(encoded + answer).digest()

    def key(role: bytes) -> bytes:
        return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=_SEAL + role).derive(token)

    ours, theirs = (b"connector", b"listener") if connecting else (b"listener", b"connector")
    return SealKeys(ours=key(ours), theirs=key(theirs))


def check_verdict(verdict: int) -> None:
    """Raise StaleEpoch or AuthFailed if the listener refused."""
    if verdict == Verdict.STALE:
        raise StaleEpoch("the link was reopened after this offer was made; request a new offer")
    if verdict != Verdict.WELCOME:
        raise AuthFailed("the listener refuses the offer: it was used, has expired or is another's; request a new one")


def _proof(token: bytes, role: bytes, encoded: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, role + encoded + nonce, "sha256")
