"""Rules for starts from cached latents: which requests may have them, and how a picture is drawn again."""

from __future__ import annotations

from typing import Final

from bottega.addons.cache.wire.prompt_words import split_words
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec

_APPROXIMATE = frozenset({generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST})

# Fields that influence the picture besides the prompt.
_BESIDE_THE_PROMPT: Final = ("image", "strength", "prompt_2")


LEAST_WORDS: Final = 3
"""Number of different words that a prompt needs for its embedding to describe the picture."""


def has_enough_words(prompt: str) -> bool:
    """Return whether a prompt has enough words for the similarity of its embedding to others to be meaningful.

    A word has a letter or a digit, and counts once.
    """
    words = {word for word in split_words(prompt.casefold()) if any(character.isalnum() for character in word)}
    return len(words) >= LEAST_WORDS


def is_cacheable(spec: GenerationSpec) -> bool:
    """Return whether the embedding of the spec's prompt describes the picture well enough for the approximate cache.

    It does not for several prompts, input images and very short prompts. The strength of a complete spec shows that it
    had an input image, even if its images were removed.
    """
    alone = not spec.prompts and not any(spec.HasField(name) for name in _BESIDE_THE_PROMPT)
    return alone and has_enough_words(spec.prompt)


def is_switched_off(spec: GenerationSpec) -> bool:
    """Return whether the request itself rules out that it starts from a cached latent or is recorded."""
    return spec.techniques.HasField("approximate_cache") and not spec.techniques.approximate_cache


def may_start(spec: GenerationSpec) -> bool:
    """Return whether the pictures of a complete spec may start from cached latents.

    Pictures that are kept for editing run all of their steps, because their latents are kept.
    """
    if spec.keep_for_editing or not is_cacheable(spec):
        return False
    return spec.fidelity in _APPROXIMATE and not is_switched_off(spec)


def pin_start(spec: GenerationSpec, start: str) -> None:
    """Make the spec of one picture repeat its start. Specs that cannot start from cached latents are unchanged.

    Args:
        start: A name from `format_start`; "" means that the picture starts from noise.
    """
    if not may_start(spec):
        return
    if start:
        spec.techniques.cache_entry = start
    else:
        spec.techniques.approximate_cache = False
