"""LoRAs of a suite: calls to their stores, uploaded files, the quarantine, and how they are profiled."""

COMMAND = "loras"
"""Name of its subcommand of `bottega`."""
