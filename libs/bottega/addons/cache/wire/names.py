"""Names of cached latents, and the denoising steps after which latents are recorded."""

from __future__ import annotations

import hashlib
import re

ENTRY_PATTERN = re.compile(r"[0-9a-f]{32}")
"""The name of a cache entry: 128 random bits in hex."""

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of the steps after which a picture's latent is recorded (Nirvana, NSDI'24, section 5: 5 to 25 of 50)."""

_START = re.compile(r"([0-9a-f]{32})@([1-9][0-9]{0,2})")


def format_start(entry: str, step: int) -> str:
    """Return the name of a start, "ENTRY@STEP", as provenances record it and requests pin it."""
    return f"{entry}@{step}"


def parse_start(text: str) -> tuple[str, int]:
    """Return entry and step of "ENTRY@STEP". Raises ValueError."""
    found = _START.fullmatch(text)
    if found is None:
        raise ValueError("a cached latent is named by 32 hex digits, @ and a step")
    return found[1], int(found[2])


def prompt_digest(prompt: str) -> str:
    """Return a digest that identifies a prompt: SHA-256 in hex."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def recorded_steps(steps: int) -> tuple[int, ...]:
    """Return the steps after which latents are recorded, ascending. Requests of few steps have fewer of them."""
    found = {round(fraction * steps) for fraction in FRACTIONS}
    return tuple(sorted(step for step in found if 0 < step < steps))
