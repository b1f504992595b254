"""Approximate caches as the SDK describes them: their contents, statistics and profiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from bottega.addons.cache.skip_profile import LengthClass, SkipProfile
from bottega.addons.cache.starts import FRACTIONS
from bottega.client.types.messages import moment_from, value_from
from bottega.client.types.provenance import Parameters, parameters_from
from bottega.errors import InternalError
from bottega.v1 import cache_pb2

_NOTHING = SkipProfile(classes=())


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """The contents of a cache for one model."""

    model_hash: str
    """Hash of the model, hex."""
    entries: int
    """Number of recorded pictures."""
    latents: int
    """Number of latents. A picture's entry has several, which are evicted one by one."""
    keys: int
    """Number of different settings among the entries. A request only starts from an entry with its own settings."""
    has_profile: bool
    """Whether thresholds were measured for the model. Without them nothing is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The contents of one cache, and its counters since its start."""

    cache: str
    """Name of the cache in the fleet."""
    models: tuple[CachedModel, ...]
    size_bytes: int
    """Bytes of all latents, and of the small pictures of their entries."""
    budget_bytes: int
    """Maximum of `size_bytes`."""
    lookups: Mapping[str, int]
    """Lookups by outcome, such as hit and miss."""
    steps_skipped: int
    """Denoising steps that requests skipped by starting from latents."""
    evictions: int
    """Number of evicted latents."""
    holes: int
    """Hits that skipped fewer steps than allowed, because the latent of the best step was evicted."""
    dropped: Mapping[str, int]
    """Number of pictures that were not recorded, by reason."""
    predictor_on: bool
    """Whether the match predictor is in use."""
    elsewhere: int
    """Number of entries that belong to other caches since some have joined or left; lookups do not find them."""
    trouble: str
    """Why nothing can be recorded now; empty if recording works."""
    failure: str = ""
    """Why the cache did not answer; everything but its name is then empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedEntry:
    """A picture whose latents a cache has recorded."""

    entry: str
    """ID of the entry: 32 hex digits."""
    parameters: Parameters
    """The complete parameters of the picture."""
    model_hash: str
    """Hash of the model, hex."""
    key: str
    """Hash of the settings that a request must share with the entry to start from it."""
    steps: tuple[int, ...]
    """The steps after which the cache has a latent of the picture."""
    size_bytes: int
    """Bytes of the entry's latents and picture."""
    recorded: datetime
    hits: int
    """Number of pictures that started from the entry."""
    picture: bytes = field(default=b"", repr=False)
    """A small PNG of the picture; empty in lists, and if the cache no longer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheProfile:
    """The thresholds of a model: how similar two prompts must be so that a cached latent may replace steps.

    Setting a profile without classes deletes that of its model. A class without thresholds forbids reuse.
    """

    model_hash: str
    """Hash of the model's weights and configuration, hex."""
    balanced: SkipProfile = _NOTHING
    """Thresholds for requests with fidelity="balanced"."""
    fast: SkipProfile = _NOTHING
    """Thresholds for requests with fidelity="fast"."""
    about: str = ""
    """How the profile was measured, for people; at most 1,000 characters."""


def silent_stats(cache: str, failure: str) -> CacheStats:
    """Return the statistics of a cache that did not answer."""
    return replace(stats_from(cache_pb2.GetCacheStatsResponse(), cache), failure=failure)


def stats_from(message: cache_pb2.GetCacheStatsResponse, cache: str) -> CacheStats:
    """Convert a message to CacheStats."""
    return CacheStats(
        cache=cache,
        models=tuple(value_from(model, CachedModel) for model in message.models),
        size_bytes=message.bytes,
        budget_bytes=message.budget_bytes,
        lookups=dict(message.lookups),
        steps_skipped=message.steps_skipped,
        evictions=message.evictions,
        holes=message.holes,
        dropped=dict(message.dropped),
        predictor_on=message.predictor_on,
        elsewhere=message.elsewhere,
        trouble=message.trouble,
    )


def entry_from(message: cache_pb2.CacheEntry, *, picture: bytes = b"") -> CachedEntry:
    """Convert a message to a CachedEntry."""
    return CachedEntry(
        entry=message.entry,
        parameters=parameters_from(message.parameters),
        model_hash=message.model_hash,
        key=message.key,
        steps=tuple(message.steps),
        size_bytes=message.bytes,
        recorded=moment_from(message.recorded_s),
        hits=message.hits,
        picture=picture,
    )


def profile_from(message: cache_pb2.CacheProfile) -> CacheProfile:
    """Convert a message to a CacheProfile. Raise InternalError if it breaks a rule of profiles."""
    try:
        return CacheProfile(
            model_hash=message.model_hash,
            balanced=SkipProfile(classes=tuple(map(_class_from, message.balanced))),
            fast=SkipProfile(classes=tuple(map(_class_from, message.fast))),
            about=message.about,
        )
    except ValueError as error:
        raise InternalError(f"the profile of {message.model_hash} cannot be used: {error}") from None


def profile_to_wire(profile: CacheProfile) -> cache_pb2.CacheProfile:
    """Convert a profile to a message."""
    return cache_pb2.CacheProfile(
        model_hash=profile.model_hash,
        balanced=_class_messages(profile.balanced),
        fast=_class_messages(profile.fast),
        about=profile.about,
    )


def _class_from(message: cache_pb2.CacheLengthClass) -> LengthClass:
    thresholds = {_nearest_fraction(each.fraction): each.similarity for each in message.thresholds}
    return LengthClass(max_words=message.max_words or math.inf, thresholds=thresholds)


def _nearest_fraction(fraction: float) -> float:
    """Return the exact fraction of steps for a rounded number from the wire; the number itself if there is none."""
    return next((known for known in FRACTIONS if math.isclose(known, fraction, abs_tol=1e-6)), fraction)


def _class_messages(profile: SkipProfile) -> Iterator[cache_pb2.CacheLengthClass]:
    for length_class in profile.classes:
        bounded = math.isfinite(length_class.max_words)
        message = cache_pb2.CacheLengthClass(max_words=int(length_class.max_words) if bounded else 0)
        for fraction, similarity in length_class.thresholds.items():
            message.thresholds.add(fraction=fraction, similarity=similarity)
        yield message
