"""What to do about errors that the approximate cache causes, in a person's words."""

from __future__ import annotations

from bottega import errors, kinds
from bottega.client.cli.error_help import storage_advice
from bottega.errors import BottegaError

_BY_CLASS = {
    errors.CacheEntryNotFound: "It was evicted or cleared, or never there; bottega cache says what the cache holds.",
    errors.CacheEntryGone: (
        "bottega cache inspect ENTRY says whether it is there, and what for: all but prompt and seed has to be equal. "
        "Without --cache-entry the picture is drawn from noise."
    ),
    errors.NoCache: "bottega fleet shows whether an approximate cache has joined; bottega logs cache why one has not.",
}


def advice_for(error: BottegaError) -> str | None:
    """None where the error is about no cache."""
    if error.metadata.get("service") == kinds.CACHE and isinstance(error, errors.StorageUnavailable):
        return storage_advice(error, "approximate cache")
    return _BY_CLASS.get(type(error))
