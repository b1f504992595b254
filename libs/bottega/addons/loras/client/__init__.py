"""The client code of LoRAs: calls to LoRA stores, uploads, the quarantine, and profiling."""

COMMAND = "loras"
"""Name of the subcommand of `bottega`."""
HELP = "List, add, measure and remove LoRAs and embeddings."
"""Help text of the subcommand. It is here so that `bottega --help` need not import the subcommand's module."""
