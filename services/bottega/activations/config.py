"""The configuration of an activation store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from bottega.rpc.server_config import LimitedLinksConfig
from bottega.rpc.service_config import AtLeastOne, NotNegative, StoreConfig
from bottega.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig(StoreConfig):
    """Settings of an activation store."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    links: LimitedLinksConfig = field(default_factory=LimitedLinksConfig)
    budget_bytes: AtLeastOne = 16 << 30
    """Bound on the bytes of activations in memory, which workers of this host share."""
    disk_bytes: AtLeastOne = 256 << 30
    """Bound on the bytes of activations on disk.

    Beyond it, or when the disk is full, whole templates are evicted, least recently used first, except pinned ones.
    """
    min_free_bytes: NotNegative = 1 << 30
    """Bytes of disk space that stay free for other programs. A value above 5 % of the disk counts as 5 %."""
    template_mib: NotNegative = 2662
    """Bound in MiB on the activations of one template; 0 for no bound.

    If a template would be larger, workers record only the blocks that save the most time per byte.
    """
    waiting_bytes: AtLeastOne = 1 << 30
    """Bound on the bytes of recordings that arrive or wait to be written. More is dropped, and no worker waits."""
    loads_at_once: AtLeastOne = 4
    """Bound on loads from disk that run at once."""
