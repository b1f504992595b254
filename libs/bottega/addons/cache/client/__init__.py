"""Approximate caches of a suite: calls to them, and their checks in `bottega doctor`."""

COMMAND = "cache"
"""Name of its subcommand of `bottega`."""
HELP = "Inspect, fill, measure and clear the approximate cache."
"""What `bottega --help` says of it, without an import of its module."""
