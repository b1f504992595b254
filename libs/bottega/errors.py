"""Every error that Bottega raises on purpose, as one tree.

A class fixes its status code and its reason; whoever raises it adds the message and the facts. The
same classes are raised by services and, on the other side of the wire, by the client; bottega.rpc
translates between the two. This module knows no gRPC.

BottegaError
├── InvalidRequest          INVALID_ARGUMENT     a field breaks a rule; lists every violation
│   ├── BadImage            INVALID_ARGUMENT     an input image cannot be decoded
│   └── BadLora             INVALID_ARGUMENT     a file cannot be taken as a LoRA
├── ModelNotFound           NOT_FOUND
├── ControlNetNotFound      NOT_FOUND
├── LoraNotFound            NOT_FOUND
├── JobNotFound             NOT_FOUND
├── ImageNotFound           NOT_FOUND
├── RequestIdReused         ALREADY_EXISTS
├── LoraExists              ALREADY_EXISTS
├── ControlNetExists        ALREADY_EXISTS
├── FieldNotServed          UNIMPLEMENTED
├── MethodNotServed         UNIMPLEMENTED
├── JobNotFinished          FAILED_PRECONDITION
├── StaleAttempt            FAILED_PRECONDITION
├── ModelMismatch           FAILED_PRECONDITION  two models under one name
├── ControlNetUnusable      FAILED_PRECONDITION  it cannot be loaded, or does not fit the model
├── LoraUnusable            FAILED_PRECONDITION  it does not fit the model, or was made for another
├── LoraInUse               FAILED_PRECONDITION  it is being sent to workers, or a job needs it
├── Poisoned                FAILED_PRECONDITION  workers die of the request
├── QueueFull               RESOURCE_EXHAUSTED   retry later
├── DeadlineUnmeetable      RESOURCE_EXHAUSTED
├── TooLarge                RESOURCE_EXHAUSTED
├── FleetFull               RESOURCE_EXHAUSTED   no room for another service
├── Unavailable             UNAVAILABLE          the service cannot be reached
│   ├── NoWorker            UNAVAILABLE          retry later
│   ├── NoControlNet        UNAVAILABLE          nobody has it at hand; retry later
│   ├── NoLora              UNAVAILABLE          the store cannot be reached, or is too slow; retry later
│   ├── LinksFull           UNAVAILABLE          no room for another tensor link now; retry soon or elsewhere
│   ├── Draining            UNAVAILABLE          retry now, elsewhere or soon
│   ├── WorkerLost          UNAVAILABLE
│   ├── ReaderStalled       UNAVAILABLE          the caller did not read its answers; retry now
│   └── StorageUnavailable  UNAVAILABLE          the disk is full or cannot be written; retry later
│       └── TooManyOpenFiles UNAVAILABLE         no file or socket can be opened; retry later
├── DataLoss                DATA_LOSS            what was stored is damaged
├── DeadlinePassed          DEADLINE_EXCEEDED
├── JobCancelled            CANCELLED
├── NotFinite               ABORTED
├── InternalError           INTERNAL             a fault of ours
├── LinkError               UNAVAILABLE          a tensor link failed, and nothing else with it
│   ├── PeerDead            UNAVAILABLE          the process at the other end is gone
│   ├── LinkClosed          UNAVAILABLE          one of the ends closed it
│   ├── DeadlineExceeded    DEADLINE_EXCEEDED    bytes or a message did not come in time
│   ├── NoCredit            RESOURCE_EXHAUSTED   every slot is full and none was given back in time
│   ├── NoSharedMemory      RESOURCE_EXHAUSTED   the system has no memory for a slot
│   ├── AuthFailed          UNAUTHENTICATED      a token that is wrong, used or too old
│   ├── StaleEpoch          FAILED_PRECONDITION  the link has been opened anew
│   ├── LayoutMismatch      FAILED_PRECONDITION  a message that is not what the receiver expects
│   ├── LeaseExpired        FAILED_PRECONDITION  a received message that was given back or kept too long
│   ├── MessageAborted      ABORTED              the sender took a message back
│   └── BadFrame            DATA_LOSS            the peer broke the link's rules
└── ConfigError             (never on the wire)  a configuration file that cannot be used
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
    """google.rpc.Code, so that the tree needs no gRPC."""

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
    """One field that broke a rule: its path as in google.rpc.BadRequest, and what would be right."""

    field: str
    description: str


class BottegaError(Exception):
    """The root. Subclasses fix `code` and `reason`.

    message: for people; names what to do where something can be done.
    metadata: facts for programs; they travel in ErrorInfo.
    retry_after_s: seconds after which a retry may help, or None when none does.
    violations: only of InvalidRequest and its kind.
    """

    code: ClassVar[Code] = Code.UNKNOWN
    reason: ClassVar[ErrorReason.ValueType] = error_pb2.ERROR_REASON_UNSPECIFIED

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
        """The reason as ErrorInfo carries it: without the enum's prefix."""
        return ErrorReason.Name(self.reason).removeprefix("ERROR_REASON_")


class InvalidRequest(BottegaError):
    """A field breaks a rule; `violations` lists all of them."""

    code = Code.INVALID_ARGUMENT
    reason = error_pb2.ERROR_REASON_INVALID_REQUEST


class BadImage(InvalidRequest):
    """An input image cannot be decoded, or is beyond the limits."""

    reason = error_pb2.ERROR_REASON_BAD_IMAGE


class ModelNotFound(BottegaError):
    """No such model; metadata["served"] lists those that are."""

    code = Code.NOT_FOUND
    reason = error_pb2.ERROR_REASON_MODEL_NOT_FOUND


class BadLora(InvalidRequest):
    """A file cannot be taken as a LoRA for the base model; the message lists what does not fit."""

    reason = error_pb2.ERROR_REASON_BAD_LORA


class LoraNotFound(BottegaError):
    """No LoRA of that name; metadata["loras"] names those that lack."""

    code = Code.NOT_FOUND
    reason = error_pb2.ERROR_REASON_LORA_NOT_FOUND


class LoraExists(BottegaError):
    """A LoRA of that name is there, with other weights or for another base model."""

    code = Code.ALREADY_EXISTS
    reason = error_pb2.ERROR_REASON_LORA_EXISTS


class LoraUnusable(BottegaError):
    """The LoRA does not fit the model, or was made for another; then metadata "lora", "made_for" and "model" say so."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_LORA_UNUSABLE


class LoraInUse(BottegaError):
    """The LoRA is being sent to workers, or a job needs it, or did a moment ago."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_LORA_IN_USE


class ControlNetNotFound(BottegaError):
    """No ControlNet of that name; metadata["served"] lists those that are."""

    code = Code.NOT_FOUND
    reason = error_pb2.ERROR_REASON_CONTROLNET_NOT_FOUND


class ControlNetExists(BottegaError):
    """The server's configuration has a ControlNet of that name, which nobody may replace."""

    code = Code.ALREADY_EXISTS
    reason = error_pb2.ERROR_REASON_CONTROLNET_EXISTS


class JobNotFound(BottegaError):
    """No such job, or it has expired."""

    code = Code.NOT_FOUND
    reason = error_pb2.ERROR_REASON_JOB_NOT_FOUND


class ImageNotFound(BottegaError):
    """The job has no image of that index."""

    code = Code.NOT_FOUND
    reason = error_pb2.ERROR_REASON_IMAGE_NOT_FOUND


class RequestIdReused(BottegaError):
    """The request_id was used for another request."""

    code = Code.ALREADY_EXISTS
    reason = error_pb2.ERROR_REASON_REQUEST_ID_REUSED


class FieldNotServed(BottegaError):
    """A field is designed but not served yet; metadata["field"] names it, several with commas between."""

    code = Code.UNIMPLEMENTED
    reason = error_pb2.ERROR_REASON_FIELD_NOT_SERVED


class MethodNotServed(BottegaError):
    """The service has no such method: it is another one, or of another version."""

    code = Code.UNIMPLEMENTED
    reason = error_pb2.ERROR_REASON_METHOD_NOT_SERVED


class JobNotFinished(BottegaError):
    """The job has no images yet."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_JOB_NOT_FINISHED


class StaleAttempt(BottegaError):
    """The attempt is superseded by a later one."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_STALE_ATTEMPT


class ModelMismatch(BottegaError):
    """Other workers serve a model of that name with another hash or element type."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_MODEL_MISMATCH


class ControlNetUnusable(BottegaError):
    """A ControlNet's files cannot be used, or it does not fit the model; the message says what does not."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_CONTROLNET_UNUSABLE


class Poisoned(BottegaError):
    """Workers died whenever they ran the request, alone. Asking again would only end more of them."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_POISONED


class QueueFull(BottegaError):
    """The queue is full."""

    code = Code.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_QUEUE_FULL


class DeadlineUnmeetable(BottegaError):
    """The request would not finish before its deadline; metadata["estimate_s"] says when it would, in seconds."""

    code = Code.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_DEADLINE_UNMEETABLE


class TooLarge(BottegaError):
    """The request cannot fit; metadata names the limit."""

    code = Code.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_TOO_LARGE


class FleetFull(BottegaError):
    """The fleet has as many members as it may have; metadata["max_members"] says how many."""

    code = Code.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_FLEET_FULL


class Unavailable(BottegaError):
    """The service cannot be reached."""

    code = Code.UNAVAILABLE


class NoWorker(Unavailable):
    """No worker serves the model now."""

    reason = error_pb2.ERROR_REASON_NO_WORKER


class NoLora(Unavailable):
    """The LoRA store cannot be reached, or is too slow; metadata["loras"] names what was asked for."""

    reason = error_pb2.ERROR_REASON_NO_LORA


class NoControlNet(Unavailable):
    """Nobody has a ControlNet at hand now, or nobody who has it can be reached.

    metadata["controlnets"] names them; metadata["servers"] those that failed; several with commas between.
    """

    reason = error_pb2.ERROR_REASON_NO_CONTROLNET


class LinksFull(Unavailable):
    """A service has as many tensor links as it serves, or as many offers of them wait to be taken up.

    metadata["limit"] says which: "links" or "offers".
    """

    reason = error_pb2.ERROR_REASON_LINKS_FULL


class Draining(Unavailable):
    """The service is stopping."""

    reason = error_pb2.ERROR_REASON_DRAINING


class WorkerLost(Unavailable):
    """The worker died or was cut off while it ran the request.

    metadata["died"] is "engine" or "worker" where that is what died, else absent; metadata["held_together"] is the
    number of requests that a dead engine had.
    """

    reason = error_pb2.ERROR_REASON_WORKER_LOST


class ReaderStalled(Unavailable):
    """The caller did not read its answers for so long that the service ended the call. The job, if any, goes on."""

    reason = error_pb2.ERROR_REASON_READER_STALLED


class StorageUnavailable(Unavailable):
    """What must be stored cannot be now: the disk is full, or cannot be written or read.

    metadata["cause"] is the system's name for it, such as ENOSPC. An operation that failed so may still have
    happened, as with any answer that was lost.
    """

    reason = error_pb2.ERROR_REASON_STORAGE_UNAVAILABLE


class TooManyOpenFiles(StorageUnavailable):
    """The service, or its machine, has as many files and sockets open as it may; the message says what to raise.

    Nothing is wrong with the disk, but nothing can be stored or read meanwhile either: whoever waits for a disk waits
    for this as well. metadata["cause"] is EMFILE or ENFILE, metadata["limit"] that of the service.
    """

    reason = error_pb2.ERROR_REASON_TOO_MANY_OPEN_FILES


class DataLoss(BottegaError):
    """What was stored is damaged: it is never answered with. Asking again does not help; an operator has to."""

    code = Code.DATA_LOSS
    reason = error_pb2.ERROR_REASON_DATA_LOSS


class DeadlinePassed(BottegaError):
    """The deadline passed before the work was done."""

    code = Code.DEADLINE_EXCEEDED
    reason = error_pb2.ERROR_REASON_DEADLINE_PASSED


class JobCancelled(BottegaError):
    """Somebody cancelled the job."""

    code = Code.CANCELLED
    reason = error_pb2.ERROR_REASON_JOB_CANCELLED


class NotFinite(BottegaError):
    """The model computed NaN or infinity."""

    code = Code.ABORTED
    reason = error_pb2.ERROR_REASON_NOT_FINITE


class InternalError(BottegaError):
    """A fault of the suite; the log says more under the same request_id."""

    code = Code.INTERNAL
    reason = error_pb2.ERROR_REASON_INTERNAL


class LinkError(BottegaError):
    """A tensor link failed; it alone. Subclasses say how."""

    code = Code.UNAVAILABLE


class PeerDead(LinkError):
    """The process at the other end is gone, or the connection to it is. What was received of a message is void."""

    reason = error_pb2.ERROR_REASON_PEER_DEAD


class LinkClosed(LinkError):
    """One of the ends closed the link."""

    reason = error_pb2.ERROR_REASON_LINK_CLOSED


class DeadlineExceeded(LinkError):
    """A link's message, or a part of one, did not move before the deadline. DeadlinePassed is that of a job."""

    code = Code.DEADLINE_EXCEEDED
    reason = error_pb2.ERROR_REASON_LINK_DEADLINE_EXCEEDED


class NoCredit(LinkError):
    """The receiver holds every slot and gave none back before the deadline. The link lives."""

    code = Code.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_NO_CREDIT


class NoSharedMemory(LinkError):
    """The system has no memory for a slot, or allows no file of its size. The link lives.

    metadata["cause"] is the system's name for it, such as ENOSPC.
    """

    code = Code.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_NO_SHARED_MEMORY


class AuthFailed(LinkError):
    """The token of a link's offer is wrong, was used or is too old. A new offer helps."""

    code = Code.UNAUTHENTICATED
    reason = error_pb2.ERROR_REASON_LINK_AUTH_FAILED


class StaleEpoch(LinkError):
    """The link has been opened anew since; only the newest epoch is served."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_STALE_EPOCH


class LayoutMismatch(LinkError):
    """A message has another layout than its receiver expects; none of its bytes were taken."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_LAYOUT_MISMATCH


class LeaseExpired(LinkError):
    """A received message was given back, or was kept too long after its link had died."""

    code = Code.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_LEASE_EXPIRED


class MessageAborted(LinkError):
    """The sender took a message back before it was whole. The link lives."""

    code = Code.ABORTED
    reason = error_pb2.ERROR_REASON_MESSAGE_ABORTED


class BadFrame(LinkError):
    """The peer broke the link's rules: a header that lies, a size beyond a limit, memory that is not sealed."""

    code = Code.DATA_LOSS
    reason = error_pb2.ERROR_REASON_BAD_FRAME


class ConfigError(BottegaError):
    """A configuration file that cannot be used. Never on the wire."""

    code = Code.FAILED_PRECONDITION
