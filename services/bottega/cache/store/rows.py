"""Which entries a prompt's next picture may start from, so that a row of its pictures stays various.

Pictures that start from one latent have its composition, and so has the picture that the latent was recorded of. So in
a row of pictures of one prompt at most one comes from noise that another one came from: of the 15 pairs of six pictures
one is alike, which adds less than .05 to their mean similarity, unless pictures from noise have next to nothing in
common. An entry that would make a second such picture rests until the row has moved on. Entries that were recorded with
the same seed began with the same noise, and count as one. Knows neither latents nor similarities.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

# Prompts that are remembered, half a kilobyte each; those that were asked about longest ago are forgotten first.
_MOST_PROMPTS = 16_384
# Pictures of a row that may come from noise that another one of it came from.
_MOST_ALIKE = 1
# A row goes on as long as its next picture comes within so many seconds, or within the time that so many of its
# pictures take: people look at what they drew just before, and wait for it where a picture takes minutes.
_ROW_S = 300.0
_ROW_PICTURES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The last pictures of a prompt."""

    noise: tuple[int, ...]
    """What each of them came from, the last one at the end."""
    until_s: float
    """When the row ends unless another picture comes."""

    @property
    def resting(self) -> frozenset[int]:
        """Noise of which one more picture would make too many that are alike."""
        different = frozenset(self.noise)
        return different if len(self.noise) - len(different) >= _MOST_ALIKE else frozenset()


class PromptRows:
    """The last pictures of each prompt, by the noise that they came from. Any thread may call it.

    Args:
        pictures: Pictures of a row; with 1 any entry may start each picture.
        now: The time, in seconds.
        most_prompts: Prompts that are remembered.
    """

    def __init__(self, pictures: int, now: Callable[[], float], most_prompts: int = _MOST_PROMPTS) -> None:
        self._before = max(0, pictures - 1)
        self._now = now
        self._most_prompts = most_prompts
        self._rows: OrderedDict[bytes, _Row] = OrderedDict()
        self._lock = threading.Lock()

    def resting(self, key: str, prompt: str) -> frozenset[int]:
        """Return the noise that the prompt's next picture must not come from.

        Args:
            key: Of the question.
            prompt: Digest of the prompt; empty is not known, and nothing rests.
        """
        if not prompt:
            return frozenset()
        with self._lock:
            return self._row(_name(key, prompt)).resting

    def reserve(self, key: str, prompt: str, noise: int, picture_s: float = 0.0) -> bool:
        """Note that a picture of the prompt starts from that noise; return False if it must rest.

        Args:
            key: Of the question.
            prompt: Digest of the prompt.
            noise: What the entry began with.
            picture_s: Seconds that a picture takes, 0 where that is not known.
        """
        if not prompt:
            return True
        name = _name(key, prompt)
        with self._lock:
            if noise in self._row(name).resting:
                return False
            self._note(name, noise, picture_s)
        return True

    def note(self, key: str, prompt: str, noise: int, picture_s: float = 0.0) -> None:
        """Note that a picture of the prompt is drawn from that noise. See `reserve`."""
        if prompt:
            with self._lock:
                self._note(_name(key, prompt), noise, picture_s)

    def note_once(self, key: str, prompt: str, noise: int) -> None:
        """The same, unless a picture of the row was noted to be drawn from that noise."""
        name = _name(key, prompt)
        with self._lock:
            if noise not in self._row(name).noise:
                self._note(name, noise)

    def release(self, key: str, prompt: str, noise: int) -> None:
        """Take back the latest reservation of that noise: no picture has started from it."""
        name = _name(key, prompt)  # of a prompt that is not known there is no row
        with self._lock:
            row = self._rows.get(name)
            if row is not None and noise in row.noise:
                place = len(row.noise) - 1 - row.noise[::-1].index(noise)
                self._rows[name] = replace(row, noise=row.noise[:place] + row.noise[place + 1 :])

    def _row(self, name: bytes) -> _Row:
        """Return the row that the prompt's next picture belongs to."""
        now_s = self._now()
        row = self._rows.get(name)
        return row if row is not None and now_s <= row.until_s else _Row(noise=(), until_s=now_s)

    def _note(self, name: bytes, noise: int, picture_s: float = 0.0) -> None:
        if not self._before:
            return
        row = self._row(name)
        # What a picture takes may be known of an earlier one alone.
        until_s = max(row.until_s, self._now() + max(_ROW_S, _ROW_PICTURES * picture_s))
        self._rows[name] = _Row(noise=(*row.noise, noise)[-self._before :], until_s=until_s)
        self._rows.move_to_end(name)
        if len(self._rows) > self._most_prompts:
            self._rows.popitem(last=False)


def _name(key: str, prompt: str) -> bytes:
    return bytes.fromhex(key) + bytes.fromhex(prompt)
