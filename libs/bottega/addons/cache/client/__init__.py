"""Approximate caches of a suite: calls to them, and their checks in `bottega doctor`."""

COMMAND = "cache"
"""Name of its subcommand of `bottega`."""
