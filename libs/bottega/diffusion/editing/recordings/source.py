"""Where recordings come from and go to, as the engine sees it: this worker's memory, or a store behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from bottega.diffusion.editing.recordings.recording import DrawnTemplate, Recording, RecordingKey

EVENTS = ("hits", "misses", "recorded", "given_up", "evictions", "dropped")


class ActivationSource(Protocol):
    """All calls come from the engine's thread, and none waits.

    A recording that it hands out is in use until it is released: it is not evicted, and what its steps hold stays where
    it is. A source may hand out one of which parts are still on their way: what a step does not have is computed.
    """

    def find(self, key: RecordingKey, recording: str = "") -> Recording | None:
        """A template's complete recording, in use from now on; None where there is none. recording: only this one."""
        ...

    def begin(self, key: RecordingKey, shape: tuple[int, int], drawn: DrawnTemplate | None = None) -> Recording | None:
        """A new recording of a template, in use from now on, until it is completed or abandoned; see Recording.

        None where somebody is recording the template, and where it has a recording already.
        """
        ...

    def reserve(self, recording: Recording, size_bytes: int) -> bool:
        """Makes room, so that the recording may take so many bytes in all; whether there is room."""
        ...

    def complete(self, recording: Recording) -> None:
        """A recording that was begun is whole: others may use it. It is not in use any more."""
        ...

    def abandon(self, recording: Recording) -> None:
        """A recording that was begun is worth nothing, and is forgotten."""
        ...

    def release(self, recording: Recording) -> None:
        """One that was found is not used any more."""
        ...

    # What operators see.

    @property
    def budget_bytes(self) -> int:
        """That all recordings may take."""
        ...

    @property
    def recordings(self) -> Sequence[Recording]:
        """Those that are here, the one used last first."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """How often what has happened since the start, by EVENTS."""
        ...

    def drop(self, prefix: str) -> int:
        """Forgets the recordings whose ids begin so, but for those in use. Returns how many."""
        ...
