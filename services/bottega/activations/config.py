"""The configuration of an activation store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from bottega.rpc.server_config import AtLeastOne, LimitedLinksConfig, NotNegative, StoreConfig
from bottega.storage.objects import ObjectsAddress
from bottega.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig(StoreConfig):
    """The configuration of an activation store."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    links: LimitedLinksConfig = field(default_factory=LimitedLinksConfig)
    budget_bytes: AtLeastOne = 16 << 30
    """Upper bound on the bytes of activations in memory, which workers on this host share."""
    disk_bytes: AtLeastOne = 256 << 30
    """Upper bound on the bytes of activations on disk.

    Beyond it, or when the disk is full, the recordings of whole images are evicted, least recently used first, except
    pinned ones.
    """
    objects: ObjectsAddress = ""
    """Where recordings are shared by all activation stores with this address: s3://bucket/prefix. Empty: on disk only.

    A store that is lost, or a template that another store becomes responsible for, then costs no recordings: they are
    read from there, with those last used on disk. Endpoint, region, credentials and encryption come from the
    environment, as for the gateway's `objects`. It needs the package obstore.
    """
    objects_bytes: AtLeastOne = 1 << 40
    """Upper bound on the bytes of all recordings in `objects`.

    Beyond it, the least recently used recordings that are not pinned are deleted."""
    min_free_bytes: NotNegative = 1 << 30
    """Bytes of disk space that stay free for other programs. At most 5 % of the disk counts."""
    template_mib: NotNegative = 2662
    """Upper bound in MiB on the activations of one image; 0 means no bound.

    If an image would need more, workers record only the blocks that save the most time per byte.
    """
    waiting_bytes: AtLeastOne = 1 << 30
    """Upper bound on the bytes of recordings that arrive or wait to be written. More is dropped; no worker waits."""
    loads_at_once: AtLeastOne = 4
    """Upper bound on the number of simultaneous loads from disk."""
