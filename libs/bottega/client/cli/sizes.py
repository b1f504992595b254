"""Bytes as people read them."""

from __future__ import annotations


def size_text(size_bytes: int) -> str:
    """Such as 3.4 KiB or 120 MiB."""
    if size_bytes < 1 << 20:
        return f"{size_bytes / 2**10:.1f} KiB"
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 10 << 20 else f"{size_bytes / 2**20:.2f} MiB"
