"""Starts from cached latents: their names, which requests may use them, and how such a picture is drawn again."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec

ENTRY_PATTERN = re.compile(r"[0-9a-f]{32}")
"""The ID of a cache entry: 128 random bits in hex."""

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of the steps after which a picture's latent is recorded (Nirvana, NSDI'24, section 5: 5 to 25 of 50)."""

_START = re.compile(r"([0-9a-f]{32})@([1-9][0-9]{0,2})")

_APPROXIMATE = frozenset({generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST})

# Fields that influence the picture besides the prompt.
_BESIDE_THE_PROMPT: Final = ("image", "strength", "prompt_2")


LEAST_WORDS: Final = 3
"""Minimum number of different words in a prompt for its embedding to describe the picture."""


def has_enough_words(prompt: str) -> bool:
    """Return whether a prompt has enough words for the similarity of its embedding to others to be meaningful.

    A word has a letter or a digit, and counts once.
    """
    words: set[str] = set()
    for found in _WORD.finditer(prompt.casefold()):  # estimates ask for every waiting job: stop at the last one needed
        if any(map(str.isalnum, found[0])):
            words.add(found[0])
            if len(words) == LEAST_WORDS:
                return True
    return False


def is_cacheable(spec: GenerationSpec) -> bool:
    """Return whether the embedding of the spec's prompt describes the picture well enough for the approximate cache.

    It does not for several prompts, weighted ones, input images, own timesteps or sigmas, and very short prompts. A
    complete spec whose images were removed still has a strength, which shows that there was an input image.
    """
    alone = not spec.prompts and not any(spec.HasField(name) for name in _BESIDE_THE_PROMPT)
    weighted = spec.prompt_syntax == generation_pb2.PROMPT_SYNTAX_WEIGHTED
    listed = bool(spec.timesteps or spec.sigmas)
    return alone and not weighted and not listed and has_enough_words(spec.prompt)


def is_switched_off(spec: GenerationSpec) -> bool:
    """Return whether the request forbids both starting from cached latents and recording its own."""
    return spec.techniques.HasField("approximate_cache") and not spec.techniques.approximate_cache


def may_start(spec: GenerationSpec) -> bool:
    """Return whether the pictures of a complete spec may start from cached latents.

    Pictures that are kept for editing compute all of their steps, because all of their latents are kept.
    """
    if spec.keep_for_editing or spec.fidelity not in _APPROXIMATE or is_switched_off(spec):
        return False
    return is_cacheable(spec)


def pin_start(spec: GenerationSpec, start: str) -> None:
    """Make the spec of one picture repeat its start. Specs that cannot start from cached latents stay unchanged.

    Args:
        start: A name from `format_start`; "" means that the picture starts from noise.
    """
    if not may_start(spec):
        return
    if start:
        spec.techniques.cache_entry = start
    else:
        spec.techniques.approximate_cache = False


def format_start(entry: str, step: int) -> str:
    """Return the name of a cached latent, "ENTRY@STEP", as in provenances and requests."""
    return f"{entry}@{step}"


def parse_start(text: str) -> tuple[str, int]:
    """Return entry and step of "ENTRY@STEP". Raise ValueError for other texts."""
    found = _START.fullmatch(text)
    if found is None:
        raise ValueError("a cached latent is named by 32 hex digits, @ and a step")
    return found[1], int(found[2])


def prompt_digest(prompt: str) -> str:
    """Return a digest that identifies a prompt: SHA-256 in hex."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def recorded_steps(steps: int) -> tuple[int, ...]:
    """Return the steps after which latents are recorded, ascending. Requests with few steps have fewer of them."""
    found = {round(fraction * steps) for fraction in FRACTIONS}
    return tuple(sorted(step for step in found if 0 < step < steps))


# Scripts without spaces between words, each with about as many characters as its words have on average.
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA = "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_SOUTH_EAST_ASIAN = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"
_WORD = re.compile(
    f"[{_HAN}]{{1,2}}|[{_KANA}]{{1,3}}|[{_SOUTH_EAST_ASIAN}]{{1,4}}|[^\\s{_HAN}{_KANA}{_SOUTH_EAST_ASIAN}]+"
)


def split_words(prompt: str) -> list[str]:
    """Return the words of a prompt.

    White space separates them. Text in a script without spaces, such as Chinese, Japanese or Thai, is cut into pieces
    of a usual word's length.
    """
    return _WORD.findall(prompt)
