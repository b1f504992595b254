"""Quotas of a tenant. Imports little: commands show it in their help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

_Most = Annotated[int, Field(ge=0, le=1 << 50)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The quotas of one tenant; 0 is without a bound."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    concurrent: _Most = 0
    """Jobs that run at once. Its other jobs wait, without holding up other tenants."""
    queued: _Most = 0
    """Jobs that wait."""
    per_minute: _Most = 0
    """New jobs in the last minute."""
    per_day: _Most = 0
    """New jobs since midnight UTC."""
    stored_bytes: _Most = 0
    """Bytes of the pictures of its remembered jobs, and of what is kept of them for edits."""
    calls: _Most = 0
    """Unary calls that one gateway serves at once."""
    streams: _Most = 0
    """Calls with streams of answers that one gateway serves at once."""


UNBOUNDED = Quotas()
