"""Objects in S3-compatible storage, through obstore, which signs, retries, and uploads large objects in parts.

Endpoint, region, credentials and server-side encryption come from the usual environment: AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SERVER_SIDE_ENCRYPTION (AES256 or aws:kms), AWS_SSE_KMS_KEY_ID and others.
Parts of an upload that was interrupted are never visible. A lifecycle rule of the bucket should delete them
(AbortIncompleteMultipartUpload).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from bottega.errors import ConfigError, StorageUnavailable
from bottega.storage.objects import CONDITIONS_IGNORED, NO_CREDENTIALS, S3Location, StoredObject
from bottega.storage.os_errors import unavailable

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
    from obstore.store import S3Store
except ImportError:
    raise ConfigError(
        "objects in S3 need obstore: pip install 'bottega-services[s3]', or deploy/install.sh install --with "
        "'bottega-libs[s3]'"
    ) from None

# Larger objects are uploaded in parts of this size, so that a retry repeats one part.
_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
_CONNECT_S = 3.0
# For a request with a part or, when it is read, a whole object: 128 MiB at 4 MiB/s.
_REQUEST_S = 32.0
_MAX_RETRIES = 4
# No retry begins later than so long after the first try.
_RETRY_S = 10.0
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0
_PROBE = "probe-"
_PROBE_DATA = b"bottega"
# Probes of processes that were killed are removed after so long.
_STALE_PROBE_S = 3600.0
_NAMES_AT_ONCE = 1000

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_CODE = re.compile(r"<Code>([A-Za-z.]{1,64})</Code>")

# Where machines and containers of AWS get credentials; obstore asks there if the environment has none.
_CREDENTIAL_PATHS = ("/latest/api/token", "/latest/meta-data/", "//169.254.")

_NO_ENDPOINT = "ENOTCONN"

_TEXTS = {
    "NoSuchBucket": "the bucket {bucket} does not exist: create it, or correct the name",
    "AccessDenied": "the credentials may not use the bucket {bucket}: allow s3:ListBucket, s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload",
    "InvalidAccessKeyId": "S3 does not know the access key: correct AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "S3 refuses the signature: correct AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "the session token of S3 has expired: renew AWS_SESSION_TOKEN",
    "InvalidToken": "S3 refuses the session token: correct AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "the clocks of this machine and of S3 differ too much: synchronize them",
    "AuthorizationHeaderMalformed": "S3 expects another region: correct AWS_REGION",
    "PermanentRedirect": "the bucket {bucket} is in another region: correct AWS_REGION or AWS_ENDPOINT_URL",
    NO_CREDENTIALS: "there are no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    CONDITIONS_IGNORED: "the S3 server overwrites objects in spite of If-None-Match: use one that keeps them",
    _NO_ENDPOINT: "S3 does not answer at {endpoint}",
}


class S3Objects:
    """An object store in a bucket, with keys <prefix>/ab/ab...; see ObjectStore.

    Args:
        names: Matches an object's whole name. Other objects below the prefix are left alone.
        public_endpoint: URL of S3 as callers reach it, for `url`; empty is the endpoint of the environment.
        request_s: Upper bound on a request, with one retry within that time; None for the usual bounds.
    """

    def __init__(
        self,
        location: S3Location,
        *,
        names: re.Pattern[str],
        public_endpoint: str = "",
        request_s: float | None = None,
    ) -> None:
        self._bucket = location.bucket
        self._names = names
        self._endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "the endpoint of AWS")
        self._store = _connect(location, self._endpoint, request_s=request_s)
        self._public = _connect(location, public_endpoint, endpoint=public_endpoint) if public_endpoint else self._store
        # The time of S3 minus the monotonic clock; None until it was measured.
        self._clock_offset: float | None = None
        self._keeps_conditions = False

    def probe(self) -> None:
        """Write, read, list and remove a small object, as a test of the bucket and of the rights."""
        key = f"{_PROBE}{uuid.uuid4().hex}"
        with self._translated():
            obstore.put(self._store, key, _PROBE_DATA)
            self._clock_offset = obstore.head(self._store, key)["last_modified"].timestamp() - time.monotonic()
            next(iter(obstore.list(self._store, prefix=_PROBE)), None)
            obstore.delete(self._store, key)

    def write(self, name: str, data: bytes) -> None:
        """Write an object, or replace it. Large ones are uploaded in parts, which become visible together."""
        with self._translated():
            obstore.put(
                *(self._store, self._key(name), data),
                attributes={"Content-Type": _media_type(data)},
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless one of that name exists, by If-None-Match. Return whether it was written."""
        self._check_conditions()
        with self._translated():
            try:
                obstore.put(self._store, self._key(name), data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        """Return an object; None if it does not exist, or if it does not have this SHA-256 and size."""
        with self._translated():
            try:
                found = obstore.get(self._store, self._key(name))
                if found.meta["size"] != size_bytes:
                    return None
                data = bytes(found.bytes())
            except (BaseError, FileNotFoundError) as error:
                if _code(error) != "NoSuchKey":
                    raise
                return None
        return data if digest == hashlib.sha256(data).digest() else None

    def upload(self, name: str, path: Path) -> None:
        """Write a file as an object, or replace it, as `write` does."""
        with self._translated(), path.open("rb") as file:
            obstore.put(self._store, self._key(name), file, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def parts(self, name: str, size_bytes: int) -> Iterator[bytes]:
        """Yield an object of this size in parts. Nothing is checked."""
        for start in range(0, size_bytes, _PART_BYTES):
            with self._translated():
                length = min(_PART_BYTES, size_bytes - start)
                part = bytes(obstore.get_range(self._store, self._key(name), start=start, length=length))
            yield part

    def objects(self, start: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose names begin with `start`, which is empty or has at least two characters."""
        if not start or self._clock_offset is None:
            self.probe()
        assert self._clock_offset is not None, "probe has measured it"
        shard = start[:2] or None
        with self._translated():
            # A name comes after everything that it begins with, but one that is equal would be left out.
            after = f"{shard}/{start[:-1]}" if len(start) > 2 else None
            for chunk in obstore.list(self._store, prefix=shard, offset=after):
                now = time.monotonic() + self._clock_offset  # a listing may take minutes
                for meta in chunk:
                    folder, _, name = meta["path"].rpartition("/")
                    age_s = max(0.0, now - meta["last_modified"].timestamp())
                    if folder == name[:2] and self._names.fullmatch(name):
                        if name.startswith(start):
                            yield StoredObject(name=name, size_bytes=meta["size"], age_s=age_s)
                        elif name > start:
                            return
                    elif not folder and name.startswith(_PROBE) and age_s > _STALE_PROBE_S:
                        obstore.delete(self._store, name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects. Ignore those that do not exist."""
        keys = [self._key(name) for name in names]
        with self._translated():
            for begin in range(0, len(keys), _NAMES_AT_ONCE):
                obstore.delete(self._store, keys[begin : begin + _NAMES_AT_ONCE])

    def url(self, name: str, *, expires_s: float) -> str:
        """Return a URL with which anybody can read an object until it expires. No request is made."""
        with self._translated():
            return obstore.sign(self._public, "GET", self._key(name), timedelta(seconds=expires_s))

    def _key(self, name: str) -> str:
        if not self._names.fullmatch(name):
            raise ValueError("not the name of an object of this store")
        return f"{name[:2]}/{name}"

    def _check_conditions(self) -> None:
        """Raise StorageUnavailable if the server ignores If-None-Match. Some do, and would overwrite objects."""
        if self._keeps_conditions:
            return
        key = f"{_PROBE}{uuid.uuid4().hex}"
        with self._translated():
            obstore.put(self._store, key, _PROBE_DATA, mode="create")
            try:
                obstore.put(self._store, key, _PROBE_DATA, mode="create")
            except AlreadyExistsError:
                self._keeps_conditions = True
            obstore.delete(self._store, key)
        if not self._keeps_conditions:
            raise self._error(CONDITIONS_IGNORED)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Convert errors of obstore to StorageUnavailable, without the text of the server."""
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._error(_cause(error)) from error

    def _error(self, cause: str) -> StorageUnavailable:
        text = _TEXTS.get(cause, "S3 has failed ({cause})")
        return unavailable(text.format(bucket=self._bucket, endpoint=self._endpoint, cause=cause), cause=cause)


def _connect(location: S3Location, url: str, *, request_s: float | None = None, **changed: Any) -> S3Store:
    """Return a client of the bucket. It makes no request. request_s: see S3Objects."""
    try:
        return S3Store(
            location.bucket,
            prefix=location.prefix or None,
            client_options={
                "allow_http": url.startswith("http://"),
                "connect_timeout": timedelta(seconds=min(_CONNECT_S, request_s or _CONNECT_S)),
                "timeout": timedelta(seconds=request_s or _REQUEST_S),
            },
            retry_config={
                "max_retries": _MAX_RETRIES if request_s is None else 1,
                "retry_timeout": timedelta(seconds=request_s or _RETRY_S),
                "backoff": {
                    "init_backoff": timedelta(seconds=_FIRST_BACKOFF_S),
                    "max_backoff": timedelta(seconds=_MAX_BACKOFF_S),
                    "base": 2,
                },
            },
            **changed,
        )
    except (BaseError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"objects: the AWS_ variables of the environment cannot be used: {first}") from None


def _media_type(data: bytes) -> str:
    """Return the media type of an object, so that a browser shows an image that it reads by a URL."""
    kinds = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"}
    return next((kind for begin, kind in kinds.items() if data.startswith(begin)), "application/octet-stream")


def _code(error: Exception) -> str:
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _cause(error: Exception) -> str:
    """Return the cause of an error: the code that S3 sent, or what else is known."""
    text = str(error)
    if code := _code(error):
        return code
    if any(path in text for path in _CREDENTIAL_PATHS):
        return NO_CREDENTIALS
    if isinstance(error, PermissionDeniedError):
        return "AccessDenied"
    if "error sending request" in text:
        return _NO_ENDPOINT
    return "EIO"
