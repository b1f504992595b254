"""A link: a pairwise, ordered connection for tensors, with two directions that do not wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from bottega.errors import LinkClosed, LinkError
from bottega.transport.channel.backend import BackendChoice, ReceiverBackend, SenderBackend
from bottega.transport.channel.buffers import SentBuffer
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.lifecycle import Lifecycle
from bottega.transport.channel.limits import Limits
from bottega.transport.channel.receiver import Incoming, Receiver
from bottega.transport.channel.sender import Outgoing, Sender
from bottega.transport.layout import Layout
from bottega.transport.memory.sealed_file import SealedFile

# How long messages may still be read after the end of their link.
LEASE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """What both ends agreed on. ours, theirs: limits of what each receives. lease_s: of messages after its end."""

    link_id: str
    epoch: int
    backend_choice: BackendChoice
    ours: Limits
    theirs: Limits
    counters: LinkCounters
    lease_s: float = LEASE_S


class Link:
    """One thread may send while another receives; `close`, `end`, `cause` and an Incoming's `release` are for any.

    A link ends once, for one cause; every later call raises that. Nothing is sent again by itself: the caller opens a
    link of the next epoch and decides what to send. Use it as a context, or close it: that frees its memory.

    A peer that dies is noticed at once by a call that waits, else by the next one. One that only stops (a debugger,
    SIGSTOP, an endless loop) looks like a slow one: calls end at their deadlines, and the caller may end the link.
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
        """Why it has ended, once a call has noticed it; None while it is open."""
        return self._lifecycle.cause

    def prepare(self, layout: Layout, deadline: Deadline) -> None:
        """Registers a layout and makes memory for it, so that its first message is as quick as the others.

        Raises as `start_message` does, except NoCredit.
        """
        self._sender.prepare(layout, deadline)

    def start_message(self, layout: Layout, deadline: Deadline) -> Outgoing:
        """Takes a credit for a message whose tensors the caller writes in place (Outgoing).

        deadline: for the credit, and for all of the message.
        Raises NoCredit, NoSharedMemory and TooLarge, after which the link lives; else what it died of.
        """
        return self._sender.start_message(layout, deadline)

    @property
    def passes_files(self) -> bool:
        """Whether a message that is sent here may carry a file: both ends are on one host."""
        return self._sender.passes_files

    def send(
        self, layout: Layout, buffers: Sequence[SentBuffer], deadline: Deadline, *, file: SealedFile | None = None
    ) -> None:
        """Sends a whole message from buffers of the caller's, one for each tensor.

        They are handed over: a device's backend may still read them, so they must not be written before `drain`.
        file: goes with the message, and none of its bytes are copied: the receiver reads the same memory, and may keep
        it for longer than message and link. Raises ValueError unless passes_files.
        Raises as `start_message` and Outgoing.finish do.
        """
        self._sender.send(layout, buffers, deadline, file)

    def drain(self, deadline: Deadline) -> None:
        """Returns when the receiver has released every message, and buffers that were handed over may be written again.

        Raises DeadlineExceeded, after which the link lives; else what it died of.
        """
        self._sender.drain(deadline)

    def recv(self, deadline: Deadline, expected: Layout | None = None) -> Incoming:
        """The next message, as soon as its header is here; wait on it for its tensors.

        expected: the only layout that is accepted. It is checked before the first byte moves; another one ends the
        link with LayoutMismatch, at both ends.
        Raises DeadlineExceeded, after which the link lives; else what it died of.
        """
        return self._receiver.recv(deadline, expected)

    def end(self, cause: LinkError) -> None:
        """Ends the link, from any thread, without waiting; calls that wait raise the cause. Close it too."""
        self._lifecycle.end(cause)

    def close(self) -> None:
        """Ends the link if it is open, and frees what it has; the peer's calls raise LinkClosed.

        Messages under way may arrive or not: `drain` first where it matters.
        """
        self._lifecycle.end(LinkClosed("the link was closed here"))
        self._sender.close()
        self._receiver.close()
