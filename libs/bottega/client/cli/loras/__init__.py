"""`bottega loras`, and what LoRAs add to other commands."""

from bottega.client.cli.loras.commands import command

__all__ = ["command"]
