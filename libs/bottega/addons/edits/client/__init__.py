"""Templates of edits, which workers record and activation stores keep: calls about them, and their checks."""

COMMAND = "templates"
"""Name of its subcommand of `bottega`."""
HELP = "List, pin, load, drop and measure templates of edits."
"""What `bottega --help` says of it, without an import of its module."""
