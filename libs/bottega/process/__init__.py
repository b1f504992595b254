"""Child processes and the framed pipe to them."""

from bottega.process.channel import MAX_FRAME_BYTES, AsyncChannel, Channel
from bottega.process.child import Child, open_pair
from bottega.process.copying import copied

__all__ = ["MAX_FRAME_BYTES", "AsyncChannel", "Channel", "Child", "copied", "open_pair"]
