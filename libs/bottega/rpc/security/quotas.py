"""The quotas of a tenant. Imports little, because commands show them in their help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

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
