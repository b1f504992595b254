"""The newest checkpoint of every attempt, for its watchers; a newer one replaces an unsent older one.

This module does not look into checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from bottega.worker.attempts import AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCheckpoint:
    """Where an attempt can be resumed: steps_done over all images, and the engine's own bytes."""

    key: AttemptKey
    steps_done: int
    data: bytes


class CheckpointWatch:
    """Keeps one checkpoint for every attempt that runs."""

    def __init__(self) -> None:
        self._newest: dict[AttemptKey, AttemptCheckpoint] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, checkpoint: AttemptCheckpoint) -> None:
        """Replaces the attempt's checkpoint."""
        self._newest[checkpoint.key] = checkpoint
        self._tell()

    def drop(self, key: AttemptKey) -> None:
        """The attempt has ended: its checkpoint is of no use."""
        self._newest.pop(key, None)

    def close(self) -> None:
        """Ends every `watch`."""
        self._closed = True
        self._tell()

    async def watch(self) -> AsyncIterator[AttemptCheckpoint]:
        """Every attempt's checkpoint as it stands, then every newer one, until closed."""
        sent: dict[AttemptKey, AttemptCheckpoint] = {}
        while not self._closed:
            changed = self._changed
            sent = {key: checkpoint for key, checkpoint in sent.items() if key in self._newest}
            unsent = [checkpoint for key, checkpoint in self._newest.items() if sent.get(key) is not checkpoint]
            for checkpoint in unsent[:1]:  # one, then look again: it takes time, and newer ones may have come
                sent[checkpoint.key] = checkpoint
                yield checkpoint
            if not unsent:
                await changed.wait()  # ends with `close`, or when the caller hangs up

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
