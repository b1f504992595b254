"""Errors of tensor links between processes."""

from __future__ import annotations

from bottega.errors.base import BottegaError, Code
from bottega.errors.requests import Unavailable
from bottega.v1 import error_pb2


class LinkError(BottegaError, code=Code.UNAVAILABLE):
    """A tensor link failed. Others are not affected."""


class LinksFull(Unavailable, reason=error_pb2.ERROR_REASON_LINKS_FULL):
    """A service has no room for another tensor link, or for another offer of one.

    metadata["limit"] is "links" or "offers".
    """


class EngineStarting(Unavailable, reason=error_pb2.ERROR_REASON_ENGINE_STARTING):
    """The service runs, but the engine that serves its links is still starting. Retry."""


class PeerDead(LinkError, reason=error_pb2.ERROR_REASON_PEER_DEAD):
    """The process at the other end, or the connection to it, is gone. Partly received messages are void."""


class LinkClosed(LinkError, reason=error_pb2.ERROR_REASON_LINK_CLOSED):
    """The link was closed by one of its ends."""


class DeadlineExceeded(LinkError, code=Code.DEADLINE_EXCEEDED, reason=error_pb2.ERROR_REASON_LINK_DEADLINE_EXCEEDED):
    """A message, or a part of one, was not transferred before the deadline. For a job, see DeadlinePassed."""


class NoCredit(LinkError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_NO_CREDIT):
    """The receiver holds every slot, and released none before the deadline. The link stays usable."""


class NoSharedMemory(LinkError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_NO_SHARED_MEMORY):
    """The system has no memory for a slot, or allows no file of its size. The link stays usable.

    metadata["cause"] is the system's name for the error, such as ENOSPC.
    """


class AuthFailed(LinkError, code=Code.UNAUTHENTICATED, reason=error_pb2.ERROR_REASON_LINK_AUTH_FAILED):
    """The token of a link's offer is wrong, used or too old. Ask for a new offer."""


class StaleEpoch(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_STALE_EPOCH):
    """The link has been reopened; only the newest epoch is served."""


class LayoutMismatch(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LAYOUT_MISMATCH):
    """A message has another layout than its receiver expects; none of its bytes were read."""


class LeaseExpired(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LEASE_EXPIRED):
    """A received message was released, or was kept too long after its link had died."""


class MessageAborted(LinkError, code=Code.ABORTED, reason=error_pb2.ERROR_REASON_MESSAGE_ABORTED):
    """The sender withdrew a message before it was complete. The link stays usable."""


class BadFrame(LinkError, code=Code.DATA_LOSS, reason=error_pb2.ERROR_REASON_BAD_FRAME):
    """The peer broke the protocol: a wrong header, a size beyond a limit, memory that is not sealed."""
