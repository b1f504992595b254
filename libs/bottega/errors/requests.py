"""Errors of requests, jobs and callers, and of services that cannot be used now."""

from __future__ import annotations

from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class InvalidRequest(BottegaError, code=Code.INVALID_ARGUMENT, reason=error_pb2.ERROR_REASON_INVALID_REQUEST):
    """A field breaks a rule; `violations` lists all of them."""


class BadImage(InvalidRequest, reason=error_pb2.ERROR_REASON_BAD_IMAGE):
    """An input image cannot be decoded, or is beyond the limits."""


class FieldNotServed(BottegaError, code=Code.UNIMPLEMENTED, reason=error_pb2.ERROR_REASON_FIELD_NOT_SERVED):
    """A field is designed but not served yet; metadata["field"] names it, several with commas between."""


class MethodNotServed(BottegaError, code=Code.UNIMPLEMENTED, reason=error_pb2.ERROR_REASON_METHOD_NOT_SERVED):
    """The service has no such method: it is another service, or another version."""


class RequestIdReused(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_REQUEST_ID_REUSED):
    """The request_id was used for another request."""


class TooLarge(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_TOO_LARGE):
    """The request cannot fit; metadata names the limit."""


class ModelNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_MODEL_NOT_FOUND):
    """No worker serves a model of that name; metadata["served"] lists the models that are served."""


class Unauthenticated(BottegaError, code=Code.UNAUTHENTICATED, reason=error_pb2.ERROR_REASON_UNAUTHENTICATED):
    """The service asks callers to identify themselves, and the call has no key, or one that it does not know."""


class Forbidden(BottegaError, code=Code.PERMISSION_DENIED, reason=error_pb2.ERROR_REASON_FORBIDDEN):
    """The caller is known, and may not do that."""


class QuotaExceeded(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_QUOTA_EXCEEDED):
    """The caller's tenant has used up a quota; metadata["quota"] names it."""


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
    """Workers crashed each time they ran the request alone. A retry would only crash more of them."""


class QueueFull(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_QUEUE_FULL):
    """The queue is full."""


class DeadlineUnmeetable(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_DEADLINE_UNMEETABLE):
    """The request would not finish before its deadline; metadata["estimate_s"] is how many seconds it would take."""


class DeadlinePassed(BottegaError, code=Code.DEADLINE_EXCEEDED, reason=error_pb2.ERROR_REASON_DEADLINE_PASSED):
    """The deadline passed before the work was done."""


class JobCancelled(BottegaError, code=Code.CANCELLED, reason=error_pb2.ERROR_REASON_JOB_CANCELLED):
    """Somebody cancelled the job."""


class NotFinite(BottegaError, code=Code.ABORTED, reason=error_pb2.ERROR_REASON_NOT_FINITE):
    """The model computed NaN or infinity."""


class ModelMismatch(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_MODEL_MISMATCH):
    """Other workers serve a model of the same name with another hash or element type."""


class FleetFull(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_FLEET_FULL):
    """The fleet has no room for another member; metadata["max_members"] is the limit."""


class Unavailable(BottegaError, code=Code.UNAVAILABLE):
    """The service cannot be reached."""


class NoWorker(Unavailable, reason=error_pb2.ERROR_REASON_NO_WORKER):
    """No worker serves the model now."""


class Draining(Unavailable, reason=error_pb2.ERROR_REASON_DRAINING):
    """The service is stopping."""


class WorkerLost(Unavailable, reason=error_pb2.ERROR_REASON_WORKER_LOST):
    """The worker died or was cut off while it ran the request.

    metadata["died"] is "engine" or "worker" if a process died, else absent; metadata["held_together"] is the number of
    requests that a dead engine was running.
    """


class ReaderStalled(Unavailable, reason=error_pb2.ERROR_REASON_READER_STALLED):
    """The caller did not read its answers for so long that the service ended the call. Its job, if any, goes on."""


class StorageUnavailable(Unavailable, reason=error_pb2.ERROR_REASON_STORAGE_UNAVAILABLE):
    """Data cannot be stored now: the disk is full, or cannot be written or read.

    metadata["cause"] is the system's name for the error, such as ENOSPC. The operation may still have happened, as when
    an answer is lost.
    """


class TooManyOpenFiles(StorageUnavailable, reason=error_pb2.ERROR_REASON_TOO_MANY_OPEN_FILES):
    """The service or its machine has no file descriptors left; the message says which limit to raise.

    Nothing can be stored or read meanwhile: callers that retry when a disk is unavailable should retry here as well.
    metadata["cause"] is EMFILE or ENFILE; metadata["limit"] is the service's limit.
    """


class DataLoss(BottegaError, code=Code.DATA_LOSS, reason=error_pb2.ERROR_REASON_DATA_LOSS):
    """Stored data is damaged, and is not returned. A retry does not help; an operator has to act."""
