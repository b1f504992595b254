"""Every error that Bottega raises on purpose, as one tree.

A class fixes its status code and its reason; the code that raises it adds the message and the facts. Services raise
these classes, and the client raises the same ones on its side of the wire; bottega.rpc translates between the two.

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
├── TraceNotFound           NOT_FOUND            no attempt has ended yet, or the trace was forgotten
├── Unauthenticated         UNAUTHENTICATED      no API key, or one that the service does not know
├── Forbidden               PERMISSION_DENIED    the caller's role or name does not allow it
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
├── CacheEntryGone          FAILED_PRECONDITION  the cached latent that a request names is gone
├── RecordingNotKept        FAILED_PRECONDITION  an edit cannot be repeated: its recording is not kept
├── Poisoned                FAILED_PRECONDITION  the request makes workers crash
├── QueueFull               RESOURCE_EXHAUSTED   retry later
├── QuotaExceeded           RESOURCE_EXHAUSTED   a quota of the caller's tenant; retry later
├── DeadlineUnmeetable      RESOURCE_EXHAUSTED
├── TooLarge                RESOURCE_EXHAUSTED
├── FleetFull               RESOURCE_EXHAUSTED   no room for another service
├── Unavailable             UNAVAILABLE          the service cannot be reached
│   ├── NoWorker            UNAVAILABLE          retry later
│   ├── NoControlNet        UNAVAILABLE          no server has it; retry later
│   ├── NoLora              UNAVAILABLE          the store cannot be reached or is too slow; retry later
│   ├── NoCache             UNAVAILABLE          no approximate cache can be reached
│   ├── NoActivationStore   UNAVAILABLE          no activation store can be reached
│   ├── LinksFull           UNAVAILABLE          no room for another tensor link; retry soon or elsewhere
│   ├── EngineStarting      UNAVAILABLE          the engine that serves tensor links is starting; retry soon
│   ├── Draining            UNAVAILABLE          retry now, elsewhere or soon
│   ├── WorkerLost          UNAVAILABLE
│   ├── ReaderStalled       UNAVAILABLE          the caller did not read its answers; retry now
│   └── StorageUnavailable  UNAVAILABLE          the disk is full or cannot be written; retry later
│       └── TooManyOpenFiles UNAVAILABLE         no file or socket can be opened; retry later
├── DataLoss                DATA_LOSS            what was stored is damaged
├── DeadlinePassed          DEADLINE_EXCEEDED
├── JobCancelled            CANCELLED
├── NotFinite               ABORTED
├── InternalError           INTERNAL             a fault in the suite
├── LinkError               UNAVAILABLE          one tensor link failed; others are not affected
│   ├── PeerDead            UNAVAILABLE          the process at the other end is gone
│   ├── LinkClosed          UNAVAILABLE          one of the ends closed it
│   ├── DeadlineExceeded    DEADLINE_EXCEEDED    bytes or a message did not come in time
│   ├── NoCredit            RESOURCE_EXHAUSTED   every slot is full, and none was released in time
│   ├── NoSharedMemory      RESOURCE_EXHAUSTED   the system has no memory for a slot
│   ├── AuthFailed          UNAUTHENTICATED      the token is wrong, used or too old
│   ├── StaleEpoch          FAILED_PRECONDITION  the link has been reopened
│   ├── LayoutMismatch      FAILED_PRECONDITION  a message has another layout than the receiver expects
│   ├── LeaseExpired        FAILED_PRECONDITION  a received message was released, or kept too long
│   ├── MessageAborted      ABORTED              the sender withdrew a message
│   └── BadFrame            DATA_LOSS            the peer broke the link's rules
└── ConfigError             (never on the wire)  a configuration file that cannot be used
    └── ServicesMissing     (never on the wire)  the SDK is installed without the services
"""

from bottega.errors.addons import *  # noqa: F403
from bottega.errors.base import *  # noqa: F403
from bottega.errors.links import *  # noqa: F403
from bottega.errors.requests import *  # noqa: F403
