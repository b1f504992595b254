"""Text for people: untrusted words as our own messages may repeat them, and how far something is."""

from __future__ import annotations


def excerpt(text: str, most: int) -> str:
    """At most so many characters of the text and `...`, all of them printable ASCII: others are escaped."""
    shown = text[:most].encode("unicode_escape").decode()
    return f"{shown}..." if len(text) > most else shown


def progress_text(stage: str, done_bytes: int, total_bytes: int) -> str:
    """Return how far a stage is, such as "loading unet, 3.1 of 5.1 GB"; the stage alone where no bytes are counted."""
    if total_bytes <= 0:
        return stage
    unit, size = ("GB", 1e9) if total_bytes >= 1e9 else ("MB", 1e6)
    return f"{stage}, {min(done_bytes, total_bytes) / size:.1f} of {total_bytes / size:.1f} {unit}"
