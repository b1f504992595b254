"""One link between two engines, as several threads of one process use it: one receives, any may send."""

from __future__ import annotations

import threading

from bottega.diffusion.tensor_messages import TensorMessage
from bottega.errors import LinkError
from bottega.transport import Deadline, Link

# A message is taken at once by a peer that lives; its threads do nothing else.
_SEND_S = 1.0


class PeerConnection:
    """Sends one message at a time.

    guests: numbers of the leader's jobs, as the follower was told of them. stepping: whether it owes an answer.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.guests: set[int] = set()
        self.stepping = False
        self._sending = threading.Lock()

    def send(self, message: TensorMessage) -> bool:
        """Whether it is on its way; else the link is over."""
        with self._sending:
            try:
                self.link.send(message.layout, message.buffers, Deadline.after(_SEND_S))
            except LinkError as error:
                self.link.end(error)
                return False
        return True
