"""The other worker of a pair, at the end of a link: led by this engine, or leading it.

`Leader` is the OffloadTarget of this engine; `Follower` has this engine compute what its peer offloads.
"""

from bottega.worker.peer.follower import Follower
from bottega.worker.peer.leader import Leader, PeerLinkSettings

__all__ = ["Follower", "Leader", "PeerLinkSettings"]
