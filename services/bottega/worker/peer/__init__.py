"""A pair of workers: `Leader` offloads batch rows to the other worker, `Follower` computes rows for it."""

from bottega.worker.peer.follower import Follower
from bottega.worker.peer.leader import Leader, PeerLinkSettings

__all__ = ["Follower", "Leader", "PeerLinkSettings"]
