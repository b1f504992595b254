"""`bottega controlnets`, and what ControlNets add to other commands."""

from bottega.client.cli.controlnets.commands import command

__all__ = ["command"]
