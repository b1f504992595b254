"""Selects the latents from which a job's pictures start, among those of similar prompts. It does not access files.

Pictures that start from one latent share its composition, and so does the picture from which it was recorded. So
`PromptRows` decides which entries a prompt's next picture may not start from. A row is the last pictures of one prompt.
In a row, at most one picture may come from the same initial noise as another. Of the 15 pairs of six pictures one is
then alike, which adds less than .05 to their mean similarity, unless pictures from noise have almost nothing in common.
An entry that would make a second such picture rests: it may not be used until the row has moved on. Entries with the
same seed began with the same noise and count as one.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from bottega.addons.cache.skip_profile import SkipProfile, served_step, skip_steps

# Decimals to which similarities are rounded. In float32 the cosine of equal embeddings differs from 1 by less.
_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An entry that a search has found."""

    number: int
    noise: int
    """Seed of the entry, which identifies its initial noise."""
    similarity: float
    """Cosine of the embeddings of the two prompts."""
    steps: Collection[int]
    """Steps after which latents of the entry were recorded."""
    hits: int = 0
    """Number of pictures that have started from the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A latent from which a picture may start."""

    number: int
    noise: int
    """Seed of the entry, which identifies its initial noise."""
    similarity: float
    """Cosine of the embeddings of the two prompts."""
    step: int
    """Number of steps after which the latent was recorded."""
    hole: bool
    """Whether the similarity would allow a later latent, which was evicted."""


def select_latents(
    candidates: Sequence[Candidate], *, profile: SkipProfile, words: int, steps: int, latest: int
) -> list[Selection]:
    """Return at most one latent of each candidate, those that save most steps first.

    Among equal ones the most similar prompt comes first, then the least used entry, so that the pictures of one prompt
    do not all start from the same latent. Each latent is similar enough for its steps, according to the profile.

    Args:
        words: Number of words of the new prompt.
        steps: Number of steps of the job.
        latest: The last step after which a usable latent was recorded.
    """
    found: list[tuple[Selection, int]] = []
    for candidate in candidates:
        similar_enough = skip_steps(profile, similarity=candidate.similarity, words=words, steps=steps)
        allowed = [step for step in similar_enough if step <= latest]
        step = served_step(allowed, candidate.steps)
        if step:
            selection = Selection(
                number=candidate.number,
                noise=candidate.noise,
                similarity=candidate.similarity,
                step=step,
                hole=step != allowed[0],
            )
            found.append((selection, candidate.hits))
    return [selection for selection, _ in sorted(found, key=_order)]


def _order(found: tuple[Selection, int]) -> tuple[float, ...]:
    selection, hits = found
    return (-selection.step, -round(selection.similarity, _DIGITS), hits, selection.number)


class Exploration:
    """Chooses hits that are not used, so that new pictures are drawn from noise and results stay diverse."""

    def __init__(self, share: float, seed: int | None) -> None:
        self._share = share
        self._random = random.Random(seed)

    def kept(self, hits: int) -> int:
        """Return how many of `hits` hits are used."""
        return sum(self._random.random() >= self._share for _ in range(hits))


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
