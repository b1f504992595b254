"""`bottega cache`, and what the approximate cache adds to other commands."""

from bottega.client.cli.cache.commands import command

__all__ = ["command"]
