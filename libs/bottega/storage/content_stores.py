"""The store of images that a configuration asks for: in a folder, or in a bucket with a folder in front."""

from __future__ import annotations

import functools
from pathlib import Path

from bottega.clocks import Clock
from bottega.storage.content import ContentStore
from bottega.storage.objects import s3_location
from bottega.storage.shared_content import OBJECT_NAMES, SharedContentStore

# Time for which a URL is valid, unless images are kept for a shorter one.
_URL_S = 3600.0


def content_store(
    folder: Path, objects: str, public_endpoint: str, *, local_bytes: int, budget_bytes: int, ttl_s: float, clock: Clock
) -> ContentStore | SharedContentStore:
    """Return a store of images in a folder or, if `objects` is s3://bucket/prefix, in a bucket with a folder in front.

    Args:
        local_bytes: Budget of the folder in front of a bucket.
        public_endpoint: URL by which callers reach S3, for URLs of images; empty if there are to be none.

    Raises ConfigError if the environment does not say how to reach the bucket, or obstore is missing.
    """
    if not objects:
        return ContentStore(folder, budget_bytes=budget_bytes, ttl_s=ttl_s, clock=clock)
    from bottega.storage.s3 import S3Objects

    local = ContentStore(folder, budget_bytes=local_bytes, ttl_s=ttl_s, clock=clock)
    bucket = S3Objects(s3_location(objects), names=OBJECT_NAMES, public_endpoint=public_endpoint)
    sign = functools.partial(bucket.url, expires_s=min(ttl_s, _URL_S)) if public_endpoint else None
    return SharedContentStore(bucket, local, budget_bytes=budget_bytes, ttl_s=ttl_s, sign=sign)
