"""Every error that Bottega raises on purpose, as one tree.

A class fixes its status code and its reason; the code that raises it adds the message and the facts. Services raise
these classes, and the client raises the same ones on its side of the wire; bottega.rpc translates between the two.
By status code, with subclasses in parentheses:

    INVALID_ARGUMENT     InvalidRequest (BadImage, BadLora, AddressRefused)
    NOT_FOUND            ModelNotFound, ControlNetNotFound, LoraNotFound, CacheEntryNotFound, JobNotFound,
                         ImageNotFound, TraceNotFound
    ALREADY_EXISTS       RequestIdReused, LoraExists, ControlNetExists
    UNAUTHENTICATED      Unauthenticated
    PERMISSION_DENIED    Forbidden
    UNIMPLEMENTED        FieldNotServed, MethodNotServed
    FAILED_PRECONDITION  JobNotFinished, StaleAttempt, StaleScheduler, ModelMismatch, ControlNetUnusable, LoraUnusable,
                         LoraInUse, CacheEntryGone, RecordingNotKept, Poisoned
    RESOURCE_EXHAUSTED   QueueFull, QuotaExceeded, DeadlineUnmeetable, TooLarge, FleetFull
    UNAVAILABLE          Unavailable (NoWorker, NoControlNet, NoLora, NoCache, NoActivationStore, LinksFull,
                         EngineStarting, Draining, WorkerLost, ReaderStalled, CannotSign,
                         StorageUnavailable (TooManyOpenFiles)),
                         LinkError (one tensor link failed; its subclasses have codes of their own)
    DEADLINE_EXCEEDED    DeadlinePassed
    CANCELLED            JobCancelled
    ABORTED              NotFinite
    DATA_LOSS            DataLoss
    INTERNAL             InternalError
    never on the wire    ConfigError (ServicesMissing)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from bottega.v1 import error_pb2
from bottega.v1.error_pb2 import ErrorReason

DOMAIN = "bottega"


class Code(IntEnum):
    """A copy of google.rpc.Code, so that the error classes need not import gRPC."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A field of a request that breaks a rule."""

    field: str
    """Path of the field, as in google.rpc.BadRequest."""
    description: str
    """The rule, and an example or range of valid values."""


class BottegaError(Exception):
    """The root of all errors. A subclass fixes its `code` and `reason`.

    Args:
        message: Text for users, with advice if the user can do anything about the error.
        metadata: Facts for programs, sent in ErrorInfo.
        retry_after_s: Seconds after which a retry may help; None if none will.
        violations: Fields that break rules. Only InvalidRequest and its subclasses have any.
    """

    code: ClassVar[Code] = Code.UNKNOWN
    reason: ClassVar[ErrorReason.ValueType] = error_pb2.ERROR_REASON_UNSPECIFIED

    def __init_subclass__(cls, *, code: Code | None = None, reason: ErrorReason.ValueType | None = None) -> None:
        """Set the subclass's code and reason; those that are not given are inherited.

        A client can only raise classes that have a reason of their own.
        """
        super().__init_subclass__()
        if code is not None:
            cls.code = code
        if reason is not None:
            cls.reason = reason

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)

    @property
    def reason_name(self) -> str:
        """The reason as it is sent in ErrorInfo: without the enum's prefix."""
        return ErrorReason.Name(self.reason).removeprefix("ERROR_REASON_")


class InternalError(BottegaError, code=Code.INTERNAL, reason=error_pb2.ERROR_REASON_INTERNAL):
    """A bug or a failure in the suite. The service's log has details under the same request_id."""


class ConfigError(BottegaError, code=Code.FAILED_PRECONDITION):
    """A configuration cannot be used, or something that it names. Never on the wire."""

    exit_status: ClassVar[int] = 2
    """Exit status of a process that ends with this error. Supervisors do not restart it, because it would fail
    again."""


class ServicesMissing(ConfigError):
    """A command needs bottega-services, but only the SDK is installed."""


class InvalidRequest(BottegaError, code=Code.INVALID_ARGUMENT, reason=error_pb2.ERROR_REASON_INVALID_REQUEST):
    """Fields of the request break rules; `violations` lists all of them."""


class BadImage(InvalidRequest, reason=error_pb2.ERROR_REASON_BAD_IMAGE):
    """An input image cannot be decoded, or exceeds a limit."""


class AddressRefused(InvalidRequest):
    """A caller named a URL that leads to an address that the service must not call."""


class FieldNotServed(BottegaError, code=Code.UNIMPLEMENTED, reason=error_pb2.ERROR_REASON_FIELD_NOT_SERVED):
    """A field is defined but not supported yet; metadata["field"] names it, or several with commas between."""


class MethodNotServed(BottegaError, code=Code.UNIMPLEMENTED, reason=error_pb2.ERROR_REASON_METHOD_NOT_SERVED):
    """The service does not have this method, because it is another service or another version."""


class RequestIdReused(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_REQUEST_ID_REUSED):
    """The request_id was already used for a different request."""


class TooLarge(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_TOO_LARGE):
    """The request exceeds a limit; metadata names the limit."""


class ModelNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_MODEL_NOT_FOUND):
    """No worker serves a model of that name; metadata["served"] lists the models that are served."""


class Unauthenticated(BottegaError, code=Code.UNAUTHENTICATED, reason=error_pb2.ERROR_REASON_UNAUTHENTICATED):
    """The service requires an API key or certificate, and the call has none, or an unknown one."""


class Forbidden(BottegaError, code=Code.PERMISSION_DENIED, reason=error_pb2.ERROR_REASON_FORBIDDEN):
    """The caller is authenticated, but does not have permission for the call."""


class QuotaExceeded(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_QUOTA_EXCEEDED):
    """The caller's tenant has used up a quota; metadata["quota"] names it."""


class JobNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_JOB_NOT_FOUND):
    """The job does not exist, or has expired."""


class ImageNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_IMAGE_NOT_FOUND):
    """The job has no image of that index."""


class TraceNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_TRACE_NOT_FOUND):
    """No attempt at the job has ended yet, or its trace was evicted."""


class JobNotFinished(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_JOB_NOT_FINISHED):
    """The job has no images yet."""


class StaleAttempt(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_STALE_ATTEMPT):
    """A later attempt at the job has replaced this one."""


class StaleScheduler(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_STALE_SCHEDULER):
    """Another gateway has become the scheduler since."""


class Poisoned(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_POISONED):
    """Workers crashed each time they ran the request alone. A retry would only crash more of them."""


class QueueFull(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_QUEUE_FULL):
    """The queue is full."""


class DeadlineUnmeetable(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_DEADLINE_UNMEETABLE):
    """The request would not finish before its deadline; metadata["estimate_s"] is how many seconds it would take."""


class DeadlinePassed(BottegaError, code=Code.DEADLINE_EXCEEDED, reason=error_pb2.ERROR_REASON_DEADLINE_PASSED):
    """The deadline passed before the work was done."""


class JobCancelled(BottegaError, code=Code.CANCELLED, reason=error_pb2.ERROR_REASON_JOB_CANCELLED):
    """A caller cancelled the job."""


class NotFinite(BottegaError, code=Code.ABORTED, reason=error_pb2.ERROR_REASON_NOT_FINITE):
    """The model computed NaN or infinity."""


class ModelMismatch(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_MODEL_MISMATCH):
    """Other workers serve a model of the same name with another hash or element type."""


class FleetFull(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_FLEET_FULL):
    """The fleet has the maximum number of members; metadata["max_members"] is the limit."""


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


class CannotSign(Unavailable, reason=error_pb2.ERROR_REASON_CANNOT_SIGN):
    """The gateway signs pictures, and its certificate has expired. An operator has to renew it."""


class StorageUnavailable(Unavailable, reason=error_pb2.ERROR_REASON_STORAGE_UNAVAILABLE):
    """Data cannot be stored now: the disk is full, or cannot be written or read.

    metadata["cause"] is the system's name for the error, such as ENOSPC. The operation may still have been executed,
    for example if only the response was lost.
    """


class TooManyOpenFiles(StorageUnavailable, reason=error_pb2.ERROR_REASON_TOO_MANY_OPEN_FILES):
    """The service or its machine has no file descriptors left; the message says which limit to raise.

    Until some are closed nothing can be stored or read, so callers that retry when a disk is unavailable should retry
    here as well. metadata["cause"] is EMFILE or ENFILE; metadata["limit"] is the service's limit.
    """


class DataLoss(BottegaError, code=Code.DATA_LOSS, reason=error_pb2.ERROR_REASON_DATA_LOSS):
    """Stored data is damaged, and is not returned. A retry does not help; an operator has to act."""


class LinkError(BottegaError, code=Code.UNAVAILABLE):
    """A tensor connection failed. Others are not affected."""


class LinksFull(Unavailable, reason=error_pb2.ERROR_REASON_LINKS_FULL):
    """A service has no room for another tensor connection or offer; metadata["limit"] is "links" or "offers"."""


class EngineStarting(Unavailable, reason=error_pb2.ERROR_REASON_ENGINE_STARTING):
    """The service runs, but its engine, which accepts tensor connections, is still starting. Retry."""


class PeerDead(LinkError, reason=error_pb2.ERROR_REASON_PEER_DEAD):
    """The process at the other end, or the connection to it, was lost. Discard partly received messages."""


class LinkClosed(LinkError, reason=error_pb2.ERROR_REASON_LINK_CLOSED):
    """A tensor connection was closed by one of its ends."""


class DeadlineExceeded(LinkError, code=Code.DEADLINE_EXCEEDED, reason=error_pb2.ERROR_REASON_LINK_DEADLINE_EXCEEDED):
    """A message, or a part of one, was not transferred before the deadline. For a job, see DeadlinePassed."""


class NoCredit(LinkError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_NO_CREDIT):
    """The receiver uses every slot, and released none before the deadline. The connection stays usable."""


class NoSharedMemory(LinkError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_NO_SHARED_MEMORY):
    """The system has no memory for a slot, or does not allow a file of its size. The connection stays usable.

    metadata["cause"] is the system's name for the error, such as ENOSPC.
    """


class AuthFailed(LinkError, code=Code.UNAUTHENTICATED, reason=error_pb2.ERROR_REASON_LINK_AUTH_FAILED):
    """The token in the offer of a tensor connection is wrong, already used or too old. Request a new offer."""


class StaleEpoch(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_STALE_EPOCH):
    """The tensor connection has been reopened; only the newest epoch is served."""


class LayoutMismatch(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LAYOUT_MISMATCH):
    """A message does not have the layout that its receiver expects; none of its bytes were read."""


class LeaseExpired(LinkError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LEASE_EXPIRED):
    """A received message was already released, or was kept too long after its connection had ended."""


class MessageAborted(LinkError, code=Code.ABORTED, reason=error_pb2.ERROR_REASON_MESSAGE_ABORTED):
    """The sender withdrew a message before it was complete. The connection stays usable."""


class BadFrame(LinkError, code=Code.DATA_LOSS, reason=error_pb2.ERROR_REASON_BAD_FRAME):
    """The peer broke the protocol: a wrong header, a size beyond a limit, memory that is not sealed."""


class BadLora(InvalidRequest, reason=error_pb2.ERROR_REASON_BAD_LORA):
    """A file cannot be used as a LoRA for the base model; the message lists what does not fit."""


class LoraNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_LORA_NOT_FOUND):
    """No LoRA of that name; metadata["loras"] names the missing ones."""


class LoraExists(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_LORA_EXISTS):
    """Another LoRA has that name: it has other weights, or is for another base model."""


class LoraUnusable(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LORA_UNUSABLE):
    """The LoRA does not fit the model; metadata has "lora", "made_for" and "model" if it was made for another one."""


class LoraInUse(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LORA_IN_USE):
    """The LoRA is being sent to workers, or a job needs it or needed it a moment ago."""


class NoLora(Unavailable, reason=error_pb2.ERROR_REASON_NO_LORA):
    """No LoRA store can be reached, or it is too slow; metadata["loras"] names the requested LoRAs."""


class ControlNetNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_CONTROLNET_NOT_FOUND):
    """No ControlNet of that name; metadata["served"] lists those that are served."""


class ControlNetExists(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_CONTROLNET_EXISTS):
    """The server's configuration has a ControlNet of that name, which cannot be replaced."""


class ControlNetUnusable(
    BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_CONTROLNET_UNUSABLE
):
    """A ControlNet's files cannot be used, or it does not fit the model; the message says what does not."""


class NoControlNet(Unavailable, reason=error_pb2.ERROR_REASON_NO_CONTROLNET):
    """No service that has metadata["controlnets"] can be reached now; metadata["servers"] names those that failed."""


class CacheEntryNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_CACHE_ENTRY_NOT_FOUND):
    """The cache has no such entry; metadata["entry"] names it."""


class CacheEntryGone(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_CACHE_ENTRY_GONE):
    """The cached latent metadata["entry"], ENTRY@STEP, does not exist any more, or was recorded with other settings."""


class NoCache(Unavailable, reason=error_pb2.ERROR_REASON_NO_CACHE):
    """No approximate cache can be reached."""


class RecordingNotKept(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_RECORDING_NOT_KEPT):
    """An edit cannot be repeated exactly: the recording that it used is gone; metadata["recording"] names it."""


class NoActivationStore(Unavailable, reason=error_pb2.ERROR_REASON_NO_ACTIVATION_STORE):
    """No activation store can be reached. Edits are drawn without recorded activations, and compute everything."""
