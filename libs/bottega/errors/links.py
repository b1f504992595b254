"""Tensor links between processes: what fails here is one link, and nothing else with it."""

from __future__ import annotations

from bottega.errors.availability import Unavailable
from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class LinkError(BottegaError, code=Code.UNAVAILABLE):
    """One tensor link failed; others are not affected. Subclasses say how."""


class LinksFull(Unavailable, reason=error_pb2.ERROR_REASON_LINKS_FULL):
    """A service has as many tensor links as it serves, or as many offers of them wait to be taken up.

    metadata["limit"] says which: "links" or "offers".
    """


class EngineStarting(Unavailable, reason=error_pb2.ERROR_REASON_ENGINE_STARTING):
    """The service runs, but the engine that serves its links is still starting. Retry."""


class PeerDead(LinkError, reason=error_pb2.ERROR_REASON_PEER_DEAD):
    """The process at the other end is gone, or the connection to it is. What was received of a message is void."""


class LinkClosed(LinkError, reason=error_pb2.ERROR_REASON_LINK_CLOSED):
    """One of the ends closed the link."""


class DeadlineExceeded(LinkError, code=Code.DEADLINE_EXCEEDED, reason=error_pb2.ERROR_REASON_LINK_DEADLINE_EXCEEDED):
    """A link's message, or a part of one, did not move before the deadline. DeadlinePassed is that of a job."""


class NoCredit(LinkError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_NO_CREDIT):
    """The receiver holds every slot and gave none back before the deadline. The link lives."""


class NoSharedMemory(LinkError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_NO_SHARED_MEMORY):
    """The system has no memory for a slot, or allows no file of its size. The link lives.

    metadata["cause"] is the system's name for it, such as ENOSPC.
    """


class AuthFailed(LinkError, code=Code.UNAUTHENTICATED, reason=error_pb2.ERROR_REASON_LINK_AUTH_FAILED):
    """The token of a link's offer is wrong, was used or is too old. A new offer helps."""


class StaleEpoch(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_STALE_EPOCH):
    """The link has been opened anew since; only the newest epoch is served."""


class LayoutMismatch(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LAYOUT_MISMATCH):
    """A message has another layout than its receiver expects; none of its bytes were taken."""


class LeaseExpired(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LEASE_EXPIRED):
    """A received message was given back, or was kept too long after its link had died."""


class MessageAborted(LinkError, code=Code.ABORTED, reason=error_pb2.ERROR_REASON_MESSAGE_ABORTED):
    """The sender took a message back before it was whole. The link lives."""


class BadFrame(LinkError, code=Code.DATA_LOSS, reason=error_pb2.ERROR_REASON_BAD_FRAME):
    """The peer broke the link's rules: a header that lies, a size beyond a limit, memory that is not sealed."""
