"""ControlNets of a suite: who hosts them, how servers are given more, and how they are profiled."""

COMMAND = "controlnets"
"""Name of its subcommand of `bottega`."""
