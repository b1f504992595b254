"""A service, a worker or a disk that cannot be used now; most of these are worth another try."""

from __future__ import annotations

from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class Unavailable(BottegaError, code=Code.UNAVAILABLE):
    """The service cannot be reached."""


class NoWorker(Unavailable, reason=error_pb2.ERROR_REASON_NO_WORKER):
    """No worker serves the model now."""


class Draining(Unavailable, reason=error_pb2.ERROR_REASON_DRAINING):
    """The service is stopping."""


class WorkerLost(Unavailable, reason=error_pb2.ERROR_REASON_WORKER_LOST):
    """The worker died or was cut off while it ran the request.

    metadata["died"] is "engine" or "worker" where that is what died, else absent; metadata["held_together"] is the
    number of requests that a dead engine had.
    """


class ReaderStalled(Unavailable, reason=error_pb2.ERROR_REASON_READER_STALLED):
    """The caller did not read its answers for so long that the service ended the call. The job, if any, goes on."""


class StorageUnavailable(Unavailable, reason=error_pb2.ERROR_REASON_STORAGE_UNAVAILABLE):
    """What must be stored cannot be now: the disk is full, or cannot be written or read.

    metadata["cause"] is the system's name for it, such as ENOSPC. An operation that failed so may still have
    happened, as with any answer that was lost.
    """


class TooManyOpenFiles(StorageUnavailable, reason=error_pb2.ERROR_REASON_TOO_MANY_OPEN_FILES):
    """The service, or its machine, has the most files and sockets open that it may; the message says what to raise.

    Nothing is wrong with the disk, but nothing can be stored or read meanwhile: callers that retry when a disk is
    unavailable should retry here as well. metadata["cause"] is EMFILE or ENFILE, metadata["limit"] that of the service.
    """


class DataLoss(BottegaError, code=Code.DATA_LOSS, reason=error_pb2.ERROR_REASON_DATA_LOSS):
    """What was stored is damaged, and is never returned. A retry does not help; an operator has to."""
