"""Which of several stores has a template: every worker finds the same one, and a store that goes moves its own alone.

Source: rendezvous hashing (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def choose(names: Iterable[str], key: str) -> str | None:
    """The name of the store for this key; None where there is none."""
    return max(names, key=lambda name: _weight(name, key), default=None)


def _weight(name: str, key: str) -> tuple[bytes, str]:
    return hashlib.sha256(f"{name}\0{key}".encode()).digest(), name
