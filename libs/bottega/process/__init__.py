"""Child processes, the framed pipe to them, and the front of an engine process."""

from bottega.process.child import ChildProcess, open_pair
from bottega.process.copying import copied
from bottega.process.engine_supervisor import EngineListener, EngineSupervisor, EngineTimeouts
from bottega.process.framed_pipe import MAX_FRAME_BYTES, AsyncFramedPipe, FramedPipe

__all__ = [
    "MAX_FRAME_BYTES",
    "AsyncFramedPipe",
    "FramedPipe",
    "ChildProcess",
    "EngineSupervisor",
    "EngineListener",
    "EngineTimeouts",
    "copied",
    "open_pair",
]
