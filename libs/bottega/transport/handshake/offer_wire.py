"""Converts offers to messages of the contract and back, and checks every field."""

from __future__ import annotations

from bottega.errors import InvalidRequest, Violation
from bottega.transport.channel.backend import Backend
from bottega.transport.channel.device_links import DeviceEndpoint
from bottega.transport.channel.limits import Limits
from bottega.transport.handshake.offer import MemfdEndpoint, Offer, TcpEndpoint
from bottega.v1 import link_pb2


def offer_to_wire(offer: Offer) -> link_pb2.LinkOffer:
    """Return the message. It holds the token: send it to the connecting process only, and never log it."""
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
    """Return the offer. Raises InvalidRequest that names the faulty field."""
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
