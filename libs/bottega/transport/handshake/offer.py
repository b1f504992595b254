"""Offers to open a link, and their messages. gRPC carries offers, but never the tensors of a link.

The token is a secret: a process that has the offer may open the link, once, before it expires. It is not printed.
"""

from __future__ import annotations

import functools
import secrets
import string
from dataclasses import dataclass, field
from pathlib import Path

from bottega.errors import InvalidRequest, Violation
from bottega.transport.channel.backend import Backend, DeviceEndpoint
from bottega.transport.channel.limits import Limits
from bottega.v1 import link_pb2

TOKEN_BYTES = 32
LINK_ID_CHARACTERS = 32
MAX_EPOCH = 2**63 - 1
_MAX_TEXT = 1024


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
