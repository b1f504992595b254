"""The interface of stores of objects, with two implementations: a local folder (BlobFiles) and S3 (S3Objects).

An object is immutable bytes under a name. Names begin with two hex digits, which are its folder in either store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import AfterValidator

NO_CREDENTIALS, CONDITIONS_IGNORED = "NoCredentials", "ConditionsIgnored"
OPERATOR_CAUSES = frozenset(
    {
        *(
            "NoSuchBucket",
            "AccessDenied",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "InvalidToken",
        ),
        *("RequestTimeTooSkewed", "AuthorizationHeaderMalformed", "PermanentRedirect"),
        *(NO_CREDENTIALS, CONDITIONS_IGNORED),
    }
)
"""Causes (`metadata["cause"]`) of errors of S3 that do not end by themselves: an operator has to change something."""

# Rules of AWS for names of buckets; each segment of the prefix has characters that no server has to escape.
_LOCATION = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/[A-Za-z0-9_.=-]+)*)")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object in the listing of a store."""

    name: str
    size_bytes: int
    age_s: float
    """Seconds since it was written, by the store's own clock, with an error below 2 s, whatever clocks writers have."""


class ObjectStore(Protocol):
    """A store of objects. All calls block, for a bounded time, and may be made from any thread.

    They raise StorageUnavailable. A write or removal that raised it may still have happened.
    """

    def probe(self) -> None:
        """Write and remove a small object, as a test of the store."""

    def write(self, name: str, data: bytes) -> None:
        """Write an object, or replace it. Readers and listings see all of it or nothing."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless one of that name exists. Return whether it was written."""

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        """Return an object; None if it does not exist, or if it does not have this SHA-256 and size."""

    def objects(self, start: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose names begin with `start`, which is empty or has at least two characters."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects. Ignore those that do not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """A bucket, and the prefix of the keys in it."""

    bucket: str
    prefix: str
    """Without slashes at its ends; may be empty."""


def s3_location(text: str) -> S3Location:
    """Return the parts of s3://bucket/prefix. Raise ValueError if it has another form."""
    found = _LOCATION.fullmatch(text)
    if found is None or any(segment.strip(".") == "" for segment in text.split("/")[3:]):
        raise ValueError("must be s3://bucket or s3://bucket/prefix, without a slash at its end")
    return S3Location(bucket=found["bucket"], prefix=found["prefix"].lstrip("/"))


def _checked(text: str) -> str:
    if text:
        s3_location(text)
    return text


def _endpoint(text: str) -> str:
    if text and not _ENDPOINT.fullmatch(text):
        raise ValueError("must be http://host, https://host or with a port, without a path")
    return text


ObjectsAddress = Annotated[str, AfterValidator(_checked)]
"""Where objects are stored, in a configuration: s3://bucket/prefix, or empty for a local folder."""
ObjectsEndpoint = Annotated[str, AfterValidator(_endpoint)]
"""URL of an S3 server, in a configuration; may be empty."""
