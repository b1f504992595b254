"""The handshake: how the two ends of a connection prove to each other that they have the same offer's token.

All functions take and return plain bytes. The connecting end sends a request, the listener answers with a challenge and
its own proof, the connecting end sends its proof, and the listener answers with a verdict. A proof is an HMAC-SHA-256
of the end's role, the request and the listener's nonce, so none fits another connection, direction, epoch, end or set
of limits. The request says whether the connection is sealed, with keys made of the token and both nonces; within a host
it is not.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import string
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bottega.errors import AuthFailed, BadFrame, InvalidRequest, StaleEpoch, Violation
from bottega.transport.backends.records import SealKeys
from bottega.transport.channel.backend import Backend, DeviceEndpoint, Limits
from bottega.v1 import link_pb2

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

TOKEN_BYTES = 32
LINK_ID_CHARACTERS = 32
MAX_EPOCH = 2**63 - 1
_MAX_TEXT = 1024


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemfdEndpoint:
    """A unix socket, for processes on the same host."""

    path: str
    host: str
    """Boot ID of the host, because host names need not be unique."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpEndpoint:
    """A TCP address to which processes on any host can connect."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An offer to open a link, with everything that the connecting process needs.

    Raises ValueError, which names the field, if a value is not valid.
    """

    link_id: str
    """ID of the link: 32 hexadecimal digits."""
    token: bytes = field(repr=False)
    epoch: int
    """Number of times that the link has been opened, counted from 1."""
    limits: Limits
    """Limits on the messages that the listener receives."""
    sealed: bool = True
    """Whether bytes that cross a network are encrypted."""
    memfd: MemfdEndpoint | None = None
    tcp: TcpEndpoint | None = None
    device: DeviceEndpoint | None = None

    def __post_init__(self) -> None:
        if not is_link_id(self.link_id):
            raise ValueError(f"link_id is {LINK_ID_CHARACTERS} hexadecimal digits")
        if len(self.token) != TOKEN_BYTES:
            raise ValueError(f"token has {TOKEN_BYTES} bytes")
        if not 1 <= self.epoch <= MAX_EPOCH:
            raise ValueError("epoch is at least 1")
        texts = [text for text in (self.memfd and self.memfd.path, self.tcp and self.tcp.host) if text]
        if self.device is not None:
            texts += [self.device.host, self.device.device, self.device.version]
        if any(len(text) > _MAX_TEXT for text in texts):
            raise ValueError(f"an endpoint is longer than {_MAX_TEXT} characters")
        if self.tcp is not None and not 1 <= self.tcp.port <= 65535:
            raise ValueError("tcp.port is 1 to 65535")


@functools.cache
def host_identity() -> str:
    """Return an identity that differs between running systems, or "" if it is unknown.

    Containers on one system have the same identity, but may see different files. Only an attempt to connect shows
    whether a socket can be reached.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def new_link_id() -> str:
    """Return a random ID that cannot be guessed."""
    return secrets.token_hex(LINK_ID_CHARACTERS // 2)


def is_link_id(text: str) -> bool:
    """Return whether the text has the form of a link ID."""
    return len(text) == LINK_ID_CHARACTERS and set(text) <= set(string.hexdigits.lower())


def offer_to_wire(offer: Offer) -> link_pb2.LinkOffer:
    """Convert an offer to its message. It contains the token: send it only to the connecting process, never log it."""
    limits = offer.limits
    message = link_pb2.LinkOffer(
        link_id=offer.link_id,
        token=offer.token,
        epoch=offer.epoch,
        limits=link_pb2.LinkLimits(slots=limits.slots, slot_bytes=limits.slot_bytes, layouts=limits.layouts),
        unsealed=not offer.sealed,
    )
    if offer.memfd is not None:
        message.memfd.path, message.memfd.host = offer.memfd.path, offer.memfd.host
    if offer.tcp is not None:
        message.tcp.host, message.tcp.port = offer.tcp.host, offer.tcp.port
    if (device := offer.device) is not None:
        message.device.host, message.device.device, message.device.version = device.host, device.device, device.version
        message.device.backends.extend(device.backends)
    return message


def offer_from_wire(message: link_pb2.LinkOffer) -> Offer:
    """Convert a message to an offer. Raises InvalidRequest, which names the invalid field."""
    wire, memfd, tcp = message.limits, message.memfd, message.tcp
    try:
        return Offer(
            link_id=message.link_id,
            token=message.token,
            epoch=message.epoch,
            limits=Limits(slots=wire.slots, slot_bytes=wire.slot_bytes, layouts=wire.layouts),
            sealed=not message.unsealed,
            memfd=MemfdEndpoint(path=memfd.path, host=memfd.host) if message.HasField("memfd") else None,
            tcp=TcpEndpoint(host=tcp.host, port=tcp.port) if message.HasField("tcp") else None,
            device=_device(message.device) if message.HasField("device") else None,
        )
    except ValueError as error:
        violation = Violation(field="offer", description=str(error))
        raise InvalidRequest(f"offer: {error}", violations=[violation]) from error


def _device(message: link_pb2.LinkDeviceEndpoint) -> DeviceEndpoint:
    known = {backend.value for backend in Backend if backend.of_devices}
    backends = tuple(Backend(name) for name in message.backends if name in known)  # a newer listener may support others
    return DeviceEndpoint(host=message.host, device=message.device, version=message.version, backends=backends)
