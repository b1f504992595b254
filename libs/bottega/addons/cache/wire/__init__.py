"""Cached latents: their names, which requests may start from them, and the messages between workers and caches."""

from bottega.addons.cache.wire.starts import (
    ENTRY_PATTERN,
    LEAST_WORDS,
    format_start,
    has_enough_words,
    is_cacheable,
    is_switched_off,
    may_start,
    parse_start,
    pin_start,
    prompt_digest,
    recorded_steps,
)

__all__ = [
    "ENTRY_PATTERN",
    "LEAST_WORDS",
    "format_start",
    "has_enough_words",
    "is_cacheable",
    "is_switched_off",
    "may_start",
    "parse_start",
    "pin_start",
    "prompt_digest",
    "recorded_steps",
]
