"""The client code of ControlNets: which services host them, how to add more to servers, and profiling."""

COMMAND = "controlnets"
"""Name of the subcommand of `bottega`."""
HELP = "List, add, load and measure ControlNets."
"""Help text of the subcommand. It is here so that `bottega --help` need not import the subcommand's module."""
