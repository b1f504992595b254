"""Templates of edits, which workers record and activation stores keep: calls about them, and their checks."""

COMMAND = "templates"
"""Name of its subcommand of `bottega`."""
