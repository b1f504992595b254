"""What a worker lacks of a job's LoRAs, in seconds: what it has to fetch, and to change in its weights.

For comparing workers, so that of two that would be done at the same time the one gets a job that has its very set in
the weights, and else one that has its LoRAs in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from bottega import kinds
from bottega.gateway.fleet.members import Member
from bottega.lora.set_key import LoraSetKey
from bottega.v1.lora_pb2 import StoredLora

# Of a store's disk and of a link of 10 Gbit/s: about as much. A worker hashes what comes, which is no faster.
_FETCHED_BYTES_PER_S = 1e9
# Of rank 16 in all attention layers of an SDXL, where a size is not known: the gateway has been started anew.
_USUAL_BYTES = 100 << 20
# Sizes that are remembered; a production trace had 7,000 LoRAs (Katz, ATC'25).
_MOST_SIZES = 16_384
# Of a swap: putting a set in writes every weight that it touches, and computes. Putting back writes them once more.
_INTO_SHARE = 2 / 3
_OUT_SHARE = 1 / 3


class LoraSizes:
    """Bytes of LoRAs by digest, as stores reported them when requests came."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def record(self, loras: Iterable[StoredLora]) -> None:
        """These were asked for."""
        for lora in loras:
            self._sizes[lora.digest] = lora.size_bytes
            self._sizes.move_to_end(lora.digest)
        while len(self._sizes) > _MOST_SIZES:
            self._sizes.popitem(last=False)

    def fetch_s(self, digests: Iterable[str]) -> float:
        """Seconds that it takes to fetch these."""
        return sum(self._sizes.get(digest, _USUAL_BYTES) for digest in digests) / _FETCHED_BYTES_PER_S


def lora_costs(loras: LoraSetKey, members: Mapping[str, Member], sizes: LoraSizes) -> Mapping[str, float]:
    """Seconds that workers need beside a job with this set, or without LoRAs; those that are not named need none."""
    if not loras:
        # Asked of all workers at every look at the queue, and most have none.
        some = ((name, member) for name, member in members.items() if kinds.LORAS in member.hosted)
        return {name: seconds for name, member in some if (seconds := _out_s(member))}
    digests = frozenset(digest for digest, _ in loras)
    return {
        name: seconds
        for name, member in members.items()
        if (seconds := sizes.fetch_s(digests - member.hosts(kinds.LORAS).digests) + _swap_s(loras, member))
    }


def _out_s(member: Member) -> float:
    """Where all of its rows come to have none."""
    hosted = member.hosts(kinds.LORAS)
    return _OUT_SHARE * hosted.switch_s if hosted.applied else 0.0


def _swap_s(loras: LoraSetKey, member: Member) -> float:
    """Where all of its rows come to have this set, which is when sets go into the weights."""
    hosted = member.hosts(kinds.LORAS)
    if loras == hosted.applied:
        return 0.0
    share = (_OUT_SHARE if hosted.applied else 0.0) + _INTO_SHARE
    return share * hosted.switch_s
