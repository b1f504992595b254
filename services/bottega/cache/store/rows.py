"""Decides which entries a prompt's next picture may not start from, so that pictures of one prompt stay diverse.

Pictures that start from one latent share its composition, and so does the picture from which it was recorded. A row is
the last pictures of one prompt. In a row, at most one picture may come from the same initial noise as another. Of the
15 pairs of six pictures one is then alike, which adds less than .05 to their mean similarity, unless pictures from
noise have almost nothing in common. An entry that would make a second such picture rests: it may not be used until the
row has moved on. Entries with the same seed began with the same noise and count as one. This module knows neither
latents nor similarities.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

# Maximum number of remembered prompts, half a kilobyte each. The least recently used ones are removed first.
_MOST_PROMPTS = 16_384
# Upper bound on the pictures of a row that come from the same noise as another picture of the row.
_MOST_ALIKE = 1
# A row ends if no picture comes within this many seconds, or within the time that this many of its pictures take: users
# compare pictures that they drew just before, and wait for a picture that takes minutes.
_ROW_S = 300.0
_ROW_PICTURES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The last pictures of a prompt."""

    noise: tuple[int, ...]
    """Initial noise (seed) of each picture, newest last."""
    until_s: float
    """Time at which the row ends unless another picture comes."""

    @property
    def resting(self) -> frozenset[int]:
        """Noises that the next picture may not use, because too many pictures of the row would be alike."""
        different = frozenset(self.noise)
        return different if len(self.noise) - len(different) >= _MOST_ALIKE else frozenset()


class PromptRows:
    """The last pictures of each prompt, by their initial noise. Any thread may call it.

    Args:
        pictures: Number of pictures in a row; with 1, every picture may start from any entry.
        now: Returns the time in seconds.
        most_prompts: Upper bound on the number of remembered prompts.
    """

    def __init__(self, pictures: int, now: Callable[[], float], most_prompts: int = _MOST_PROMPTS) -> None:
        self._before = max(0, pictures - 1)
        self._now = now
        self._most_prompts = most_prompts
        self._rows: OrderedDict[bytes, _Row] = OrderedDict()
        self._lock = threading.Lock()

    def resting(self, key: str, prompt: str) -> frozenset[int]:
        """Return the noises from which the prompt's next picture may not start.

        Args:
            key: Key of the question.
            prompt: Digest of the prompt; "" if unknown: then nothing is returned.
        """
        if not prompt:
            return frozenset()
        with self._lock:
            return self._row(_name(key, prompt)).resting

    def reserve(self, key: str, prompt: str, noise: int, picture_s: float = 0.0) -> bool:
        """Record that a picture of the prompt starts from a noise. Return False if that noise rests.

        Args:
            key: Key of the question.
            prompt: Digest of the prompt.
            noise: Initial noise of the entry.
            picture_s: Seconds that a picture takes; 0 if unknown.
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
        """Record that a picture of the prompt is drawn from a noise. The arguments are those of `reserve`."""
        if prompt:
            with self._lock:
                self._note(_name(key, prompt), noise, picture_s)

    def note_once(self, key: str, prompt: str, noise: int) -> None:
        """Record a picture of the prompt that was drawn from a noise, unless the row has one from that noise."""
        name = _name(key, prompt)
        with self._lock:
            if noise not in self._row(name).noise:
                self._note(name, noise)

    def release(self, key: str, prompt: str, noise: int) -> None:
        """Undo the latest reservation of a noise, because no picture has started from it."""
        name = _name(key, prompt)  # an unknown prompt ("") has no row
        with self._lock:
            row = self._rows.get(name)
            if row is not None and noise in row.noise:
                place = len(row.noise) - 1 - row.noise[::-1].index(noise)
                self._rows[name] = replace(row, noise=row.noise[:place] + row.noise[place + 1 :])

    def _row(self, name: bytes) -> _Row:
        """Return the row to which the prompt's next picture belongs."""
        now_s = self._now()
        row = self._rows.get(name)
        return row if row is not None and now_s <= row.until_s else _Row(noise=(), until_s=now_s)

    def _note(self, name: bytes, noise: int, picture_s: float = 0.0) -> None:
        if not self._before:
            return
        row = self._row(name)
        # The duration may be known only from an earlier picture.
        until_s = max(row.until_s, self._now() + max(_ROW_S, _ROW_PICTURES * picture_s))
        self._rows[name] = _Row(noise=(*row.noise, noise)[-self._before :], until_s=until_s)
        self._rows.move_to_end(name)
        if len(self._rows) > self._most_prompts:
            self._rows.popitem(last=False)


def _name(key: str, prompt: str) -> bytes:
    return bytes.fromhex(key) + bytes.fromhex(prompt)
