"""`bottega templates`, and what recorded activations add to other commands."""

from bottega.client.cli.templates.commands import command

__all__ = ["command"]
