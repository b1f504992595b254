"""LoRAs in the client: calls to their stores, uploads, the quarantine, and profiling."""

COMMAND = "loras"
"""Name of its subcommand of `bottega`."""
HELP = "List, add, measure and remove LoRAs."
"""What `bottega --help` says of it, without an import of its module."""
