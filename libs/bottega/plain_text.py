"""Untrusted text as our own messages may repeat it."""

from __future__ import annotations


def excerpt(text: str, most: int) -> str:
    """At most so many characters of the text and `...`, all of them printable ASCII: others are escaped."""
    shown = text[:most].encode("unicode_escape").decode()
    return f"{shown}..." if len(text) > most else shown
