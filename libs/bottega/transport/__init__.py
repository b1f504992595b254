"""Links: pairwise, ordered connections that move tensors between processes, beside the gRPC that opens them.

Services use LinkServer and workers use LinkClient. Both open links, reopen lost ones, and hand each message to a
LinkHandler. Below them, a listener makes an offer, gRPC carries the offer, and the other process connects. Then both
processes have a Link:

    with LinkListener(Endpoints(unix_path=path, tcp=("127.0.0.1", 0))) as listener:
        offer = listener.offer()                        # gRPC carries offer_to_wire(offer)
        link = listener.accept(offer, deadline)         # peer: link = connect(offer_from_wire(message), deadline)

    with link.start_message(layout, deadline) as outgoing:      # waits for a credit
        fill(outgoing.views[0]); outgoing.ready(1)      # the receiver may use the first tensor now
        fill(outgoing.views[1]); outgoing.finish()

    with link.recv(deadline, expected=layout) as incoming:
        incoming.wait(1, deadline); use(incoming.view(0))       # torch.frombuffer(incoming.view(0), dtype=...)
        incoming.wait(2, deadline); use(incoming.view(1))

Every backend keeps these promises, and one suite tests all backends (tests/service/transport/test_conformance.py):

- Each direction is ordered and has its own credit: a message needs a free slot, and only the receiver frees slots.
- A layout is registered before its first message. The header of a message is checked before its first byte moves.
- Every call ends by its deadline. If a message never arrives completely, the tensors that did arrive are void.
- Within a host, a message may carry a file in sealed memory (`SealedFile`). Both ends read the same pages and
  no byte is copied. Link.passes_files tells whether a link supports this. A file is at most as large as a slot.
- A link ends once, for one cause, and does not end other links. Nothing is sent twice. Received memory stays valid as
  long as something refers to it.
- Between hosts, everything after the handshake is sealed in records (backends/records.py), unless the listener is
  configured to trust the network. Within a host, bytes are neither encrypted nor signed.
  tests/service/transport/test_sealed.py tests attacks on records.
- Within a host, links accept processes of one user and root, or of a group that shares them (handshake/binding.py).
  Both ends check this: a socket of another user is never used, even if that user has the token.

Between devices (bottega.device_links, which imports torch) the tensors of a message lie in device memory, except those
of its header. Outgoing.parts and Incoming.part give access to them. channel/backend.py specifies what a backend must
do.
"""

from bottega.transport.channel.backend import (
    Backend,
    BackendChoice,
    Deadline,
    DeviceBuffer,
    DeviceEndpoint,
    DeviceLinks,
    Limits,
    Part,
    ProvenConnections,
    SentBuffer,
    in_host_memory,
)
from bottega.transport.channel.counters import LinkCounters, LinkStatistics, TransferStatistics
from bottega.transport.channel.receiver import Incoming
from bottega.transport.channel.sender import Outgoing
from bottega.transport.client import LinkClient, LinkClientHandler, LinkClientSettings, OfferSource, ServiceOffer
from bottega.transport.connection import Connection, LinkHandler
from bottega.transport.handshake.binding import Endpoints, default_socket_path, links_group
from bottega.transport.handshake.connector import connect
from bottega.transport.handshake.listener import LinkListener
from bottega.transport.handshake.messages import MemfdEndpoint, Offer, TcpEndpoint, offer_from_wire, offer_to_wire
from bottega.transport.layout import DType, Layout, TensorSpec
from bottega.transport.link import Link
from bottega.transport.memory import SealedFile
from bottega.transport.messages import (
    BytesMessage,
    PieceSize,
    RateLimiter,
    WholeMessage,
    kind_of,
    number_message,
    number_spec,
    pack_number,
    read_number,
)
from bottega.transport.server import MESSAGE_S, LinkServer, LinkServerSettings

__all__ = [
    "Backend",
    "DeviceBuffer",
    "Part",
    "SentBuffer",
    "in_host_memory",
    "DeviceEndpoint",
    "DeviceLinks",
    "ProvenConnections",
    "Limits",
    "Incoming",
    "Outgoing",
    "LinkClient",
    "LinkClientHandler",
    "LinkClientSettings",
    "OfferSource",
    "ServiceOffer",
    "Connection",
    "LinkHandler",
    "connect",
    "LinkCounters",
    "LinkStatistics",
    "TransferStatistics",
    "Deadline",
    "Endpoints",
    "links_group",
    "BackendChoice",
    "MemfdEndpoint",
    "Offer",
    "TcpEndpoint",
    "offer_from_wire",
    "offer_to_wire",
    "default_socket_path",
    "DType",
    "Layout",
    "TensorSpec",
    "Link",
    "LinkListener",
    "SealedFile",
    "PieceSize",
    "RateLimiter",
    "BytesMessage",
    "WholeMessage",
    "kind_of",
    "number_message",
    "number_spec",
    "pack_number",
    "read_number",
    "MESSAGE_S",
    "LinkServer",
    "LinkServerSettings",
]
