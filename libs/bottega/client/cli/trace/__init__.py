"""`bottega trace`: what of a job took how long, as a file for trace viewers, and as a picture."""

from bottega.client.cli.trace.commands import command

__all__ = ["command"]
