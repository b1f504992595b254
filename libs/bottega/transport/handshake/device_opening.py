"""Opens a link between devices: both ends set it up together, and first check that bytes pass in both directions."""

from __future__ import annotations

from dataclasses import replace

from bottega.errors import BadFrame, LinkError
from bottega.transport.channel.backend import DeviceLinks, ProvenConnections, ReceiverBackend, SenderBackend, on_host
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.channel.limits import Deadline, Limits
from bottega.transport.layout import DType, Layout, TensorSpec
from bottega.transport.link import Link, LinkTerms

# The first NCCL group in a process takes seconds.
_SET_UP_S = 10.0
_PROBE_BYTES = 4096
# 251 is prime, so no two aligned positions look alike.
_PATTERN = (bytes(range(251)) * (_PROBE_BYTES // 251 + 1))[:_PROBE_BYTES]


def open_device_link(terms: LinkTerms, devices: DeviceLinks, connections: ProvenConnections) -> Link:
    """Open the link, while the other end does the same.

    Raises LinkError with the reason; everything is closed then.
    """
    deadline = Deadline.after(_SET_UP_S)
    ends = devices.open(terms.backend_choice.backend, connections, deadline)
    _probe(terms, ends, deadline)
    return Link(terms, *ends)


def _probe(terms: LinkTerms, ends: tuple[SenderBackend, ReceiverBackend], deadline: Deadline) -> None:
    """Send a pattern each way over a temporary link, so that the counters of the real link start at zero."""
    link = Link(replace(terms, counters=LinkCounters()), *ends)
    sent, expected = _layout(terms.theirs), _layout(terms.ours)
    try:
        link.send(sent, [_PATTERN[: sent.specs[0].size_bytes]], deadline)
        with link.recv(deadline, expected) as incoming:
            incoming.wait_all(deadline)
            if bytes(on_host([incoming.part(0)])[0]) != _PATTERN[: expected.specs[0].size_bytes]:
                raise BadFrame("the received bytes differ from the sent bytes")
        link.drain(deadline)
    except LinkError as error:
        link.end(error)
        link.close()
        raise


def _layout(limits: Limits) -> Layout:
    """Return the layout of the probe message that an end with these limits receives."""
    return Layout.of(TensorSpec(name="probe", dtype=DType.UINT8, shape=(min(_PROBE_BYTES, limits.slot_bytes),)))
