"""LoRAs as a worker reports them: at hand, and in its weights."""

from __future__ import annotations

from bottega import kinds
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, HOSTED_STATE_LOADED, Hosted


def at_hand(*digests: str) -> list[Hosted]:
    """These are in the worker's memory."""
    return [Hosted(kind=kinds.LORAS, digest=digest, state=HOSTED_STATE_LOADED) for digest in digests]


def applied(digest: str, scale: float = 1.0) -> Hosted:
    """It is in the worker's weights."""
    return Hosted(kind=kinds.LORAS, digest=digest, scale=scale, state=HOSTED_STATE_APPLIED)
