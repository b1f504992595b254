"""Every error that Bottega raises on purpose, as one tree.

A class fixes its status code and its reason; the code that raises it adds the message and the facts. Services raise
these classes, and the client raises the same ones on its side of the wire; bottega.rpc translates between the two.
Each file has the errors of one subject.

BottegaError
├── InvalidRequest          INVALID_ARGUMENT     a field breaks a rule; lists every violation
│   ├── BadImage            INVALID_ARGUMENT     an input image cannot be decoded
│   └── BadLora             INVALID_ARGUMENT     a file cannot be taken as a LoRA
├── ModelNotFound           NOT_FOUND
├── ControlNetNotFound      NOT_FOUND
├── LoraNotFound            NOT_FOUND
├── CacheEntryNotFound      NOT_FOUND
├── JobNotFound             NOT_FOUND
├── ImageNotFound           NOT_FOUND
├── TraceNotFound           NOT_FOUND            what of a job took how long is not known, or not any more
├── Unauthenticated         UNAUTHENTICATED      no API key, or none of this service
├── Forbidden               PERMISSION_DENIED    not for callers of that role, or of that name
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
├── CacheEntryGone          FAILED_PRECONDITION  the cached latent that a request pins
├── RecordingNotKept        FAILED_PRECONDITION  what an edit took from a recording, which nothing draws again
├── Poisoned                FAILED_PRECONDITION  workers die of the request
├── QueueFull               RESOURCE_EXHAUSTED   retry later
├── QuotaExceeded           RESOURCE_EXHAUSTED   a quota of the caller's tenant; retry later
├── DeadlineUnmeetable      RESOURCE_EXHAUSTED
├── TooLarge                RESOURCE_EXHAUSTED
├── FleetFull               RESOURCE_EXHAUSTED   no room for another service
├── Unavailable             UNAVAILABLE          the service cannot be reached
│   ├── NoWorker            UNAVAILABLE          retry later
│   ├── NoControlNet        UNAVAILABLE          nobody has it; retry later
│   ├── NoLora              UNAVAILABLE          the store cannot be reached, or is too slow; retry later
│   ├── NoCache             UNAVAILABLE          no approximate cache can be reached
│   ├── NoActivationStore   UNAVAILABLE          no activation store can be reached
│   ├── LinksFull           UNAVAILABLE          no room for another tensor link now; retry soon or elsewhere
│   ├── EngineStarting      UNAVAILABLE          what tensor links end at is starting; retry soon
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
    └── ServicesMissing     (never on the wire)  the SDK is installed alone, and services are asked for
"""

from bottega.errors.access import *  # noqa: F403
from bottega.errors.activations import *  # noqa: F403
from bottega.errors.availability import *  # noqa: F403
from bottega.errors.base import *  # noqa: F403
from bottega.errors.cache import *  # noqa: F403
from bottega.errors.controlnets import *  # noqa: F403
from bottega.errors.fleet import *  # noqa: F403
from bottega.errors.jobs import *  # noqa: F403
from bottega.errors.links import *  # noqa: F403
from bottega.errors.loras import *  # noqa: F403
from bottega.errors.requests import *  # noqa: F403
