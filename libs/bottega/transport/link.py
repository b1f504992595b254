"""A link: a pairwise, ordered connection for tensors, with two directions that do not wait for each other.

Both ends of a link between devices set it up together, and first check that bytes pass in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from bottega.errors import BadFrame, LinkClosed, LinkError
from bottega.transport.channel.backend import (
    BackendChoice,
    Deadline,
    DeviceLinks,
    Limits,
    ProvenConnections,
    ReceiverBackend,
    SenderBackend,
    SentBuffer,
    on_host,
)
from bottega.transport.channel.counters import Lifecycle, LinkCounters
from bottega.transport.channel.receiver import Incoming, Receiver
from bottega.transport.channel.sender import Outgoing, Sender
from bottega.transport.layout import DType, Layout, TensorSpec
from bottega.transport.memory import SealedFile

# How long messages may still be read after the end of their link.
LEASE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """The terms that both ends of a link agreed on."""

    link_id: str
    epoch: int
    backend_choice: BackendChoice
    ours: Limits
    """Limits on the messages that this process receives."""
    theirs: Limits
    """Limits on the messages that the other process receives."""
    counters: LinkCounters
    lease_s: float = LEASE_S
    """Seconds for which messages stay readable after the link has ended."""


class Link:
    """A link to another process. One thread may send while another receives.

    Any thread may use `close`, `end`, `cause` and Incoming.release. A link ends once, for one cause, and every later
    call raises it. Nothing is sent again automatically: the caller opens a link of the next epoch and decides what to
    send. Use it as a context manager or close it to free its memory.

    A waiting call notices a dead peer at once, any other call does when it is made. A peer that is only stopped (by a
    debugger, SIGSTOP or an infinite loop) looks slow: calls end at their deadlines, and the caller may end the link.
    """

    def __init__(self, terms: LinkTerms, sender_backend: SenderBackend, receiver_backend: ReceiverBackend) -> None:
        self.link_id = terms.link_id
        self.epoch = terms.epoch
        self.backend_choice = terms.backend_choice
        self.counters = terms.counters
        self._lifecycle = Lifecycle((sender_backend, receiver_backend), terms.counters)
        self._sender = Sender(sender_backend, terms.theirs, self._lifecycle, terms.counters)
        self._receiver = Receiver(receiver_backend, terms.ours, self._lifecycle, terms.counters, terms.lease_s)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def cause(self) -> LinkError | None:
        """Why the link has ended, once a call has noticed it; None while it is open."""
        return self._lifecycle.cause

    def prepare(self, layout: Layout, deadline: Deadline) -> None:
        """Register a layout and allocate memory for it, so that its first message is as fast as later ones.

        Raises like `start_message`, except NoCredit.
        """
        self._sender.prepare(layout, deadline)

    def start_message(self, layout: Layout, deadline: Deadline) -> Outgoing:
        """Take a credit for a message whose tensors the caller writes in place (see Outgoing).

        Raises NoCredit, NoSharedMemory and TooLarge, after which the link lives, or the cause of its end.

        Args:
            deadline: For the credit, and for the whole message.
        """
        return self._sender.start_message(layout, deadline)

    @property
    def passes_files(self) -> bool:
        """Whether a message sent here may carry a file, because both ends are on one host."""
        return self._sender.passes_files

    def send(
        self, layout: Layout, buffers: Sequence[SentBuffer], deadline: Deadline, *, file: SealedFile | None = None
    ) -> None:
        """Send a whole message from the caller's buffers, one for each tensor.

        A device backend may read the buffers later, so do not write them before `drain`. Raises like `start_message`
        and Outgoing.finish.

        Args:
            file: Goes with the message without a copy: the receiver reads the same memory, and may keep it longer than
                message and link. Raises ValueError unless passes_files.
        """
        self._sender.send(layout, buffers, deadline, file)

    def drain(self, deadline: Deadline) -> None:
        """Wait until the receiver has released every message. Buffers that were sent may then be written again.

        Raises DeadlineExceeded, after which the link lives, or the cause of its end.
        """
        self._sender.drain(deadline)

    def recv(self, deadline: Deadline, expected: Layout | None = None) -> Incoming:
        """Return the next message as soon as its header has arrived; wait on it for its tensors.

        Raises DeadlineExceeded, after which the link lives, or the cause of its end.

        Args:
            expected: The only accepted layout, checked before the first byte moves. Another one ends the link with
                LayoutMismatch at both ends.
        """
        return self._receiver.recv(deadline, expected)

    def end(self, cause: LinkError) -> None:
        """End the link from any thread, without waiting. Waiting calls raise the cause. Close the link too."""
        self._lifecycle.end(cause)

    def close(self) -> None:
        """End the link if it is open, and free its memory. The peer's calls raise LinkClosed.

        Messages under way may get lost: call `drain` first if they matter.
        """
        self._lifecycle.end(LinkClosed("the link was closed here"))
        self._sender.close()
        self._receiver.close()


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
