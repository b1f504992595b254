"""Which requests may have pictures that start from cached latents, and what draws such a picture again."""

from __future__ import annotations

from typing import Final

from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec

_APPROXIMATE = frozenset({generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST})

# What a picture is made of as well where a spec has it.
_BESIDE_THE_PROMPT: Final = ("image", "strength", "prompt_2")


def is_cacheable(spec: GenerationSpec) -> bool:
    """Whether its prompt alone, by the embedding of it, stands for what is drawn.

    Of a complete spec whose images were removed the strength tells that it had one.
    """
    return not any(spec.HasField(name) for name in _BESIDE_THE_PROMPT)


def is_switched_off(spec: GenerationSpec) -> bool:
    """Whether the request itself says that nothing starts from a cached latent, nor becomes one."""
    return spec.techniques.HasField("approximate_cache") and not spec.techniques.approximate_cache


def may_start(spec: GenerationSpec) -> bool:
    """Whether the pictures of a complete spec may start from cached latents.

    Those that are kept for editing make all of their steps, whose latents are kept.
    """
    if spec.keep_for_editing or not is_cacheable(spec):
        return False
    return spec.fidelity in _APPROXIMATE and not is_switched_off(spec)


def pin_start(spec: GenerationSpec, start: str) -> None:
    """Has the spec of one picture draw it from what it started from again.

    start: as `format_start` names it; empty is noise. Leaves a spec alone of which no picture may start otherwise.
    """
    if not may_start(spec):
        return
    if start:
        spec.techniques.cache_entry = start
    else:
        spec.techniques.approximate_cache = False
