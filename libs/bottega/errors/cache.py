"""The approximate cache and its entries."""

from __future__ import annotations

from bottega.errors.availability import Unavailable
from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class CacheEntryNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_CACHE_ENTRY_NOT_FOUND):
    """The cache has no such entry; metadata["entry"] names it."""


class CacheEntryGone(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_CACHE_ENTRY_GONE):
    """The latent that a request pins is gone, or is another kind of request's; metadata["entry"] is "ENTRY@STEP"."""


class NoCache(Unavailable, reason=error_pb2.ERROR_REASON_NO_CACHE):
    """No approximate cache can be reached."""
