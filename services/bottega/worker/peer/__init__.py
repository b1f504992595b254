"""The other worker of a pair, at the end of a link: led by this engine, or leading it.

`Peer` is the Follower of this engine; `Following` has this engine compute what its peer lends.
"""

from bottega.worker.peer.following import Following
from bottega.worker.peer.leading import Peer, PeerOffer, PeerOffers, PeerSettings

__all__ = ["Following", "Peer", "PeerOffer", "PeerOffers", "PeerSettings"]
