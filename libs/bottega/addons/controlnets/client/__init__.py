"""ControlNets in the client: which services host them, how to add more to servers, and profiling."""

COMMAND = "controlnets"
"""Name of its subcommand of `bottega`."""
