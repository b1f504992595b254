"""What a tenant may have at most. Imports little: commands show it in their help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

_Most = Annotated[int, Field(ge=0, le=1 << 50)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Of one tenant; 0 is without bound.

    concurrent: jobs that run at once; others of it wait, and nobody waits for them. queued: jobs that wait.
    per_minute, per_day: new jobs, in the last minute and since midnight UTC, over restarts too.
    stored_bytes: of the pictures of its jobs that are remembered, and of what is kept of them for edits.
    calls, streams: served at once by one gateway: calls with one answer, and those with many.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    concurrent: _Most = 0
    queued: _Most = 0
    per_minute: _Most = 0
    per_day: _Most = 0
    stored_bytes: _Most = 0
    calls: _Most = 0
    streams: _Most = 0


UNBOUNDED = Quotas()
