"""Child processes: the framed pipe to them, pools of limited ones, and the supervisor of an engine process."""

from bottega.process.child import ChildProcess, open_pair
from bottega.process.copying import copied
from bottega.process.engine_environment import engine_environment
from bottega.process.engine_supervisor import EngineListener, EngineSupervisor, EngineTimeouts, StartProgress
from bottega.process.fair_lanes import CallNeed
from bottega.process.framed_pipe import MAX_FRAME_BYTES, AsyncFramedPipe, FramedPipe
from bottega.process.limited_process import Loss, ProcessLost, ProcessSpec
from bottega.process.pending_calls import PendingCalls
from bottega.process.process_pool import PoolLimits, PreparedCall, ProcessPool

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
    "copied",
    "open_pair",
    "engine_environment",
]
