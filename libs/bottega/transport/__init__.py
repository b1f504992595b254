"""Links: pairwise, ordered connections that move tensors between processes, beside the gRPC that opens them.

A listener makes an offer, gRPC carries it, the other process connects; both have a Link then. What follows is one way
of using it; the classes say what each call raises.

    with LinkListener(Endpoints(unix_path=path, tcp=("127.0.0.1", 0))) as listener:
        offer = listener.offer()                        # offer_to_wire(offer) goes by gRPC
        link = listener.accept(offer, deadline)         # there: link = connect(offer_from_wire(message), deadline)

    with link.begin(layout, deadline) as outgoing:      # waits for a credit
        fill(outgoing.views[0]); outgoing.ready(1)      # the receiver may have the first tensor now
        fill(outgoing.views[1]); outgoing.finish()

    with link.recv(deadline, expected=layout) as incoming:
        incoming.wait(1, deadline); use(incoming.view(0))       # torch.frombuffer(incoming.view(0), dtype=...)
        incoming.wait(2, deadline); use(incoming.view(1))

What holds for every backend, and is tested for all by one suite (tests/service/transport/test_conformance.py):

- Each direction is ordered and has its own credit; nothing moves without one. Slots are the receiver's to give back.
- A layout is registered before its first message, and a message's header is checked before its first byte moves.
- Every call ends by its deadline. A message is never handed out as whole unless it is; what was taken of one that
  does not become whole is void.
- Within a host a message may carry a file (sealed memory, files.py): both ends then look at the same pages, and no byte
  is copied. Link.passes_files says whether; a file counts as its message does, and is no larger than a slot may be.
- A link dies alone and for one cause, nothing is sent twice, and what it brought stays valid memory while it is
  referred to.
- After the hello bytes are neither encrypted nor signed: TCP is for networks that are trusted.
- Within a host links are for processes of one user and root, or of a group that shares them (credentials.py), and both
  ends look: no socket of another user is listened on, connected to or answered, whatever it knows.

What the seam (seam.py) promises to backends of devices, which will stand beside memfd.py and tcp.py, not in this
core:

- The link says everything in notices that an outlet and an inlet carry over a connection of their own: a device
  backend keeps one (unix or TCP, streams.py) for notices, and moves bytes beside it. One connection for each
  direction, so a group (ProcessGroupNCCL) or slot pool (CUDA IPC) for each direction fits, and none is shared by two
  links.
- The core never looks at a slot's bytes: it passes what `slot`, `open` and `stage` return through, by spec. A device
  backend's slot is a device tensor in the place of the memoryview, sliced by the same offsets (64-byte aligned, slots
  by page), and `views` and `view` hand out slices of it.
- Slots are few, long-lived, and known by index: memory is exported once for each (one cudaMalloc each, no expandable
  segments) and told with a SEGMENT; it is unmapped in `close`, which comes when the peer is known to be dead, not at
  the next handshake. `slot` is called before anything is written, with the size of the message.
- `move` may be called when the work that fills the tensors is only enqueued: the backend owns a stream for each
  direction, makes it wait for the caller's current one, and says DATA when its copy is enqueued or done, whichever
  its receiver needs.
- Readiness before a receive: `open` is called when the header has been checked and before any byte is asked for,
  `fill` after that. A backend that must not post a receive before the sender has come (NCCL) posts it in `fill`,
  because the DATA notice says that the sender is there; one whose sender must not start before the receive is posted
  answers from `open`.
- Nothing is asked of a backend without a deadline, but a stuck kernel returns by none: `shut` may come at any time
  from any thread, a liveness monitor's by Link.end, and must free whoever is stuck (ProcessGroupNCCL.abort()).
- `grant` is called when the consumer is done with a slot; a backend whose consumers enqueue work records an event
  there and lets the notice wait for it.
- Two ends on one device, two ranks of one group, device numbers and peer access are for the backend's probe, which
  joins `connect`'s ways before memfd, and says why when it does not pass.
"""

from bottega.transport.boundary import link_boundary
from bottega.transport.channel.backend import Backend
from bottega.transport.channel.limits import Limits
from bottega.transport.channel.receiver import Incoming
from bottega.transport.channel.sender import Outgoing
from bottega.transport.connector import connect
from bottega.transport.counters import LinkCounters, LinkStatistics, TransferStatistics
from bottega.transport.deadline import Deadline
from bottega.transport.handshake.binding import Endpoints
from bottega.transport.handshake.credentials import links_group
from bottega.transport.handshake.offer import BackendChoice, MemfdEndpoint, Offer, TcpEndpoint
from bottega.transport.handshake.offer_wire import offer_from_wire, offer_to_wire
from bottega.transport.handshake.socket_folder import default_socket_path
from bottega.transport.keepalive import Keepalive
from bottega.transport.layout import DType, Layout, TensorSpec
from bottega.transport.link import Link
from bottega.transport.listener import LinkListener
from bottega.transport.memory.sealed_file import SealedFile
from bottega.transport.server import MESSAGE_S, TOKEN_S, LinkHandler, LinkLog, LinkServer, send

__all__ = [
    "Link",
    "LinkListener",
    "Endpoints",
    "default_socket_path",
    "links_group",
    "connect",
    "Deadline",
    "Limits",
    "Layout",
    "TensorSpec",
    "DType",
    "SealedFile",
    "Outgoing",
    "Incoming",
    "Offer",
    "BackendChoice",
    "Backend",
    "MemfdEndpoint",
    "TcpEndpoint",
    "LinkServer",
    "LinkHandler",
    "send",
    "MESSAGE_S",
    "TOKEN_S",
    "LinkLog",
    "Keepalive",
    "link_boundary",
    "offer_to_wire",
    "offer_from_wire",
    "LinkCounters",
    "LinkStatistics",
    "TransferStatistics",
]
