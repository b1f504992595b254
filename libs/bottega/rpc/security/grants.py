"""What a tenant may use: models and adapters, quotas, and the bounds of its weight.

Imports little, because every command imports it, and commands show quotas in their help.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

_Most = Annotated[int, Field(ge=0, le=1 << 50)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The quotas of one tenant; 0 means no bound."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    concurrent: _Most = 0
    """Upper bound on jobs that run at the same time. Its other jobs wait without delaying other tenants."""
    queued: _Most = 0
    """Upper bound on waiting jobs."""
    per_minute: _Most = 0
    """Upper bound on new jobs in any minute."""
    per_day: _Most = 0
    """Upper bound on new jobs per day (UTC)."""
    stored_bytes: _Most = 0
    """Upper bound on the bytes of its jobs' stored pictures, and of the latents that are kept for edits."""
    calls: _Most = 0
    """Upper bound on unary calls that one gateway serves at the same time."""
    streams: _Most = 0
    """Upper bound on calls with streams of answers that one gateway serves at the same time."""


UNBOUNDED = Quotas()


MAX_GRANTED = 1024
MAX_NAME_CHARACTERS = 200
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
"""Bounds of a tenant's weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The names of shared models and adapters that a tenant may use. An empty list allows all of that kind.

    Raises ValueError for invalid names.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    models: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    """Names of shared LoRAs. A tenant may always use its own."""
    controlnets: tuple[str, ...] = ()
    """Names of shared ControlNets. A tenant may always use its own."""

    def __post_init__(self) -> None:
        for kind in (field.name for field in fields(self)):
            names = getattr(self, kind)
            if len(names) > MAX_GRANTED:
                raise ValueError(f"{kind} must have at most {MAX_GRANTED} names")
            if not all(0 < len(name) <= MAX_NAME_CHARACTERS for name in names):
                raise ValueError(f"names in {kind} must have 1 to {MAX_NAME_CHARACTERS} characters")


ALL_GRANTED = Grants()
