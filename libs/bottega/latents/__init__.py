"""Cached latents as workers and the approximate cache speak of them: their names, and messages over a link."""

from bottega.latents.names import ENTRY_PATTERN, format_start, parse_start, recorded_steps

__all__ = ["ENTRY_PATTERN", "format_start", "parse_start", "recorded_steps"]
