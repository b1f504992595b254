"""LoRAs in the client: calls to their stores, uploads, the quarantine, and profiling."""

COMMAND = "loras"
"""Name of its subcommand of `bottega`."""
