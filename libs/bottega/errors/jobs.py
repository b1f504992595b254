"""What a job or an attempt can fail with, and what is refused because of a job."""

from __future__ import annotations

from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class JobNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_JOB_NOT_FOUND):
    """No such job, or it has expired."""


class ImageNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_IMAGE_NOT_FOUND):
    """The job has no image of that index."""


class TraceNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_TRACE_NOT_FOUND):
    """No attempt at the job has ended yet, or its trace was forgotten."""


class JobNotFinished(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_JOB_NOT_FINISHED):
    """The job has no images yet."""


class StaleAttempt(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_STALE_ATTEMPT):
    """The attempt is superseded by a later one."""


class Poisoned(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_POISONED):
    """Workers died whenever they ran the request, alone. Asking again would only end more of them."""


class QueueFull(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_QUEUE_FULL):
    """The queue is full."""


class DeadlineUnmeetable(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_DEADLINE_UNMEETABLE):
    """The request would not finish before its deadline; metadata["estimate_s"] says when it would, in seconds."""


class DeadlinePassed(BottegaError, code=Code.DEADLINE_EXCEEDED, reason=error_pb2.ERROR_REASON_DEADLINE_PASSED):
    """The deadline passed before the work was done."""


class JobCancelled(BottegaError, code=Code.CANCELLED, reason=error_pb2.ERROR_REASON_JOB_CANCELLED):
    """Somebody cancelled the job."""


class NotFinite(BottegaError, code=Code.ABORTED, reason=error_pb2.ERROR_REASON_NOT_FINITE):
    """The model computed NaN or infinity."""
