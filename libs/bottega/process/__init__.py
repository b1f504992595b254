"""Child processes: the framed pipe to them, pools of processes with limits, and the supervisor of an engine process."""

from bottega.process.child import MAX_FRAME_BYTES, AsyncFramedPipe, ChildProcess, FramedPipe, open_pair
from bottega.process.engine_supervisor import (
    EngineListener,
    EngineSupervisor,
    EngineTimeouts,
    PendingCalls,
    StartProgress,
    engine_environment,
)
from bottega.process.limited_process import Loss, ProcessLost, ProcessSpec
from bottega.process.process_pool import CallNeed, PoolLimits, PreparedCall, ProcessPool

__all__ = [
    "MAX_FRAME_BYTES",
    "AsyncFramedPipe",
    "CallNeed",
    "ChildProcess",
    "EngineListener",
    "EngineSupervisor",
    "EngineTimeouts",
    "FramedPipe",
    "Loss",
    "PendingCalls",
    "PoolLimits",
    "PreparedCall",
    "ProcessLost",
    "ProcessPool",
    "ProcessSpec",
    "StartProgress",
    "open_pair",
    "engine_environment",
]
