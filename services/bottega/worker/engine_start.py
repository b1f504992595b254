"""How the start of an engine is told: to the log where it takes long, to systemd, and to the fleet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from bottega.plain_text import progress_text
from bottega.process import StartProgress
from bottega.v1 import fleet_pb2

_log = logging.getLogger(__name__)

# A stage that is over sooner is not logged; one that is not is logged again from time to time.
_QUIET_S = 2.0
_REPEAT_S = 10.0
# Before its first word an engine is a process that starts.
_FIRST_STAGE = StartProgress(stage="starting the engine")


class EngineStart:
    """A start of an engine, from the spawn of its process until it is ready or lost.

    Args:
        extend: Told, with each sign of progress, how far the start is; systemd then allows it more time.
    """

    def __init__(self, extend: Callable[[str], None]) -> None:
        self._extend = extend
        self._progress = _FIRST_STAGE
        self._stage_began_s = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._begin_stage()

    @property
    def text(self) -> str:
        """Return how far it is, such as "loading unet, 3.1 of 5.1 GB"."""
        return progress_text(self._progress.stage, self._progress.done_bytes, self._progress.total_bytes)

    @property
    def message(self) -> fleet_pb2.StartProgress:
        """Return how far it is, as the fleet is told."""
        said = self._progress
        return fleet_pb2.StartProgress(stage=said.stage, done_bytes=said.done_bytes, total_bytes=said.total_bytes)

    def note(self, progress: StartProgress) -> None:
        """Take in that the engine has got further."""
        is_new = progress.stage != self._progress.stage
        if is_new:
            self._end_stage()
        self._progress = progress
        if is_new:
            self._begin_stage()
        self._extend(self.text)

    def end(self) -> dict[str, float]:
        """End it, and return the seconds of its stages. Harmless when it has ended."""
        if self._timer is not None:
            self._end_stage()
        return self._seconds

    def _begin_stage(self) -> None:
        self._stage_began_s = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(_QUIET_S, self._log_stage)

    def _end_stage(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stage = self._progress.stage
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - self._stage_began_s

    def _log_stage(self) -> None:
        _log.info("engine starting", extra={"progress": self.text})
        self._timer = asyncio.get_running_loop().call_later(_REPEAT_S, self._log_stage)
