"""The client code of approximate caches: SDK methods, the command `bottega cache`, and checks of `bottega doctor`."""

COMMAND = "cache"
"""Name of the subcommand of `bottega`."""
HELP = "Inspect, fill, measure and clear the approximate cache."
"""Help text of the subcommand. It is here so that `bottega --help` need not import the subcommand's module."""
