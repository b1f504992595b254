"""Formats text for users: excerpts of untrusted text, and the progress of a stage."""

from __future__ import annotations


def excerpt(text: str, most: int) -> str:
    """Return at most `most` characters of a text, then `...` if it was cut. All but printable ASCII is escaped."""
    shown = text[:most].encode("unicode_escape").decode()
    return f"{shown}..." if len(text) > most else shown


def progress_text(stage: str, done_bytes: int, total_bytes: int) -> str:
    """Return the progress of a stage, such as "loading unet, 3.1 of 5.1 GB"; only the stage if no bytes are counted."""
    if total_bytes <= 0:
        return stage
    unit, size = ("GB", 1e9) if total_bytes >= 1e9 else ("MB", 1e6)
    return f"{stage}, {min(done_bytes, total_bytes) / size:.1f} of {total_bytes / size:.1f} {unit}"
