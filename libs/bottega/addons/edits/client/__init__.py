"""The client code of edits, about templates: activations that workers record of an image, for later edits of it."""

COMMAND = "templates"
"""Name of the subcommand of `bottega`."""
HELP = "List, pin, load, drop and measure templates of edits."
"""Help text of the subcommand. It is here so that `bottega --help` need not import the subcommand's module."""
