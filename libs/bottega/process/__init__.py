"""Child processes, the framed pipe to them, and the front of an engine process."""

from bottega.process.channel import MAX_FRAME_BYTES, AsyncChannel, Channel
from bottega.process.child import Child, open_pair
from bottega.process.copying import copied
from bottega.process.engine_front import EngineFront, Listener, Patience

__all__ = [
    "MAX_FRAME_BYTES",
    "AsyncChannel",
    "Channel",
    "Child",
    "EngineFront",
    "Listener",
    "Patience",
    "copied",
    "open_pair",
]
