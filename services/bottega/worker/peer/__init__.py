"""The other worker of a pair: `Leader` offloads rows to it, `Follower` computes rows that it offloads here."""

from bottega.worker.peer.follower import Follower
from bottega.worker.peer.leader import Leader, PeerLinkSettings

__all__ = ["Follower", "Leader", "PeerLinkSettings"]
