"""A link: a pairwise, ordered connection for tensors, with two directions that do not wait for each other.

What carries it, its backend knows; how it came to be, listener and connector do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from bottega.errors import LinkClosed, LinkError
from bottega.transport.channel.backend import BackendChoice, ReceiverBackend, SenderBackend
from bottega.transport.channel.buffers import Buffer
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.lifecycle import Lifecycle
from bottega.transport.channel.limits import Limits
from bottega.transport.channel.receiver import Incoming, Receiver
from bottega.transport.channel.sender import Outgoing, Sender
from bottega.transport.layout import Layout
from bottega.transport.memory.sealed_file import SealedFile

# After a link's death, for how long what it brought may still be looked at.
LEASE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """What both ends agreed on. ours, theirs: what each takes in. lease_s: how long messages outlive the link here."""

    link_id: str
    epoch: int
    backend_choice: BackendChoice
    ours: Limits
    theirs: Limits
    counters: LinkCounters
    lease_s: float = LEASE_S


class Link:
    """One thread may send while another receives; `close`, `end`, `cause` and an Incoming's `release` are for any.

    A link dies alone, once, and of one cause; from then on every call raises that. Nothing is sent again by itself:
    open a new epoch and decide. Use it as a context, or close it: that gives descriptors and memory back.

    A peer that dies is noticed at once, by whoever waits or by the next call. One that only stops (a debugger, SIGSTOP,
    an endless loop) cannot be told from a slow one: calls end at their deadlines, and the caller may end the link.
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
        """What it died of, as far as anybody has noticed; None while it lives."""
        return self._lifecycle.cause

    def prepare(self, layout: Layout, deadline: Deadline) -> None:
        """Registers a layout and makes memory for it, so that its first message is as quick as the others.

        Raises as `start_message` does, except NoCredit.
        """
        self._sender.prepare(layout, deadline)

    def start_message(self, layout: Layout, deadline: Deadline) -> Outgoing:
        """Takes a credit; the message's views are then to be written in place, and to be said ready.

        deadline: for the credit, and for all of the message.
        Raises NoCredit, NoSharedMemory and TooLarge, after which the link lives; else what it died of.
        """
        return self._sender.start_message(layout, deadline)

    @property
    def passes_files(self) -> bool:
        """Whether a message that is sent here may carry a file: both ends are on one host."""
        return self._sender.passes_files

    def send(
        self, layout: Layout, buffers: Sequence[Buffer], deadline: Deadline, *, file: SealedFile | None = None
    ) -> None:
        """Sends a whole message from buffers of the caller's, one for each tensor.

        They are handed over: a device's backend may still read them, so they must not be written before `drain`.
        file: goes with the message, none of its bytes being copied: the receiver looks at the same memory, and keeps
        it for as long as it likes, whatever becomes of message and link. Only where passes_files; ValueError if not.
        Raises as `start_message` and Outgoing.finish do.
        """
        self._sender.send(layout, buffers, deadline, file)

    def drain(self, deadline: Deadline) -> None:
        """Returns when the receiver has given back every message: it is done with them, and with buffers handed over.

        Raises DeadlineExceeded, after which the link lives; else what it died of.
        """
        self._sender.drain(deadline)

    def recv(self, deadline: Deadline, expected: Layout | None = None) -> Incoming:
        """The next message, as soon as it has begun; wait on it for its tensors.

        expected: the only layout that is taken. It is checked before the first byte moves; another one ends the link
        with LayoutMismatch, at both ends.
        Raises DeadlineExceeded, after which the link lives; else what it died of.
        """
        return self._receiver.recv(deadline, expected)

    def end(self, cause: LinkError) -> None:
        """Ends the link, from any thread, without waiting; whoever waits in a call wakes up. Close it too."""
        self._lifecycle.end(cause)

    def close(self) -> None:
        """Ends the link if it lives, and gives everything back; the peer is told LinkClosed.

        What is under way then may arrive or not: `drain` first where it matters.
        """
        self._lifecycle.end(LinkClosed("the link was closed here"))
        self._sender.close()
        self._receiver.close()
