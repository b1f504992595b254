"""ControlNets in the client: which services host them, how to add more to servers, and profiling."""

COMMAND = "controlnets"
"""Name of its subcommand of `bottega`."""
HELP = "List, add and measure ControlNets."
"""What `bottega --help` says of it, without an import of its module."""
