"""The worker's settings for cached latents. The module imports no torch, because the worker's front reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStartsConfig:
    """Settings for pictures that start from cached latents."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    former_engine_keys: ClassVar[Mapping[str, str]] = {
        "cache_timeout_s": "cache.timeout_s",
        "cache_silence_s": "cache.silence_s",
        "cache_recording_bytes": "cache.recording_bytes",
    }
    """Former keys of the engine's settings, and the keys here that replaced them."""

    timeout_s: Seconds = 10.0
    """Seconds that a request waits for a cached latent that it names itself (cache_entry)."""
    silence_s: Seconds = 5.0
    """Seconds without a message after which an approximate cache counts as dead."""
    recording_bytes: NotNegative = 64 << 20
    """Maximum bytes of recorded latents that wait to be sent to the cache. More are dropped."""
