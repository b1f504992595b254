"""The configuration of an approximate cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.rpc.server_config import AtLeastOne, LinksConfig, NotNegative, StoreConfig
from bottega.storage.objects import ObjectsAddress
from bottega.strict import STRICT

Share = Annotated[float, Field(ge=0, le=1)]

PolicyName = Literal["lcbfu", "lcbfu-decayed", "lru", "lfu", "fifo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIndexConfig:
    """The index of the embeddings that a cache keeps in memory."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,2})?)$")] = "cpu"
    """Where the embeddings of settings with 10,000 entries or more are compared: cpu, cuda, or cuda:N.

    CUDA needs `bottega-services[cache-gpu]` in place of `bottega-services[cache]`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(StoreConfig):
    """The configuration of an approximate cache."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    links: LinksConfig = field(default_factory=LinksConfig)
    budget_bytes: AtLeastOne = 16 << 30
    """Upper bound on the bytes of latents and of the small picture that each entry has.

    With `objects`, those of all caches that share them.
    """
    min_free_bytes: NotNegative = 1 << 30
    """Bytes of disk space that stay free for other programs. At most 5 % of the disk counts."""
    max_entries: AtLeastOne = 200_000
    """Upper bound on the number of images with cached latents."""
    policy: PolicyName = "lcbfu"
    """Which latents are evicted first when the budget is used up.

    "lcbfu" evicts the lowest product of use frequency and step first (Nirvana, NSDI'24). "lcbfu-decayed" does the same
    with a frequency that halves over time. The others exist for comparison.
    """
    half_life: AtLeastOne = 10_000
    """Number of lookups after which the frequency of lcbfu-decayed halves."""
    exploration: Share = 0.05
    """Share of hits that are not used: those images are drawn from noise, so that images stay diverse."""
    row_pictures: AtLeastOne = 6
    """Of this many successive images of a prompt, by any caller, at most one shares its initial noise with another.

    1: no limit.
    """
    plain_for_loras: bool = False
    """Whether images with LoRAs may start from latents that were recorded without LoRAs.

    They start at most at the step at which the LoRAs must be loaded. Set it only if the loss that `make
    bench-cache-quality` measures with LoRAs (lora_accuracy_drop_points) is small enough for you.
    """
    database: str = ""
    """URL of a PostgreSQL database (15 or newer) with the extension pgvector (0.8 or newer) that has the embeddings.

    Such as postgresql://bottega@db.example/bottega, with the password in PGPASSWORD or PGPASSFILE. Without `objects`,
    latents and records stay in the folder. While the database is away, pictures begin from noise. The graph that makes
    searches fast is built after the first start, with up to 1 GiB of the server's memory. Empty: embeddings are in
    memory.
    """
    objects: ObjectsAddress = ""
    """Where latents are stored, with their records in `database`: s3://bucket/prefix. Empty: in the folder.

    Caches with the same `objects` and `database` share the entries: each needs a name of its own, and answers for a
    part of them, also for its part of those of a cache that is gone. No other database may use the prefix, because
    objects without a record are deleted. Endpoint, region and credentials come from the environment, as for the
    gateway's `objects`. It needs the package obstore.
    """
    local_bytes: AtLeastOne = 2 << 30
    """Upper bound on the bytes of copies on disk of the latents in `objects` that were used last."""
    index: CacheIndexConfig = field(default_factory=CacheIndexConfig)
    predictor: bool = True
    """Whether to skip searches that are predicted to find nothing, if measurements show that this saves time."""
    profiles: list[str] = field(default_factory=list)
    """Files of measured profiles (CacheProfile as JSON), for models without a stored profile."""
