"""A group of commands with a default command."""

from __future__ import annotations

import click


class ListGroup(click.Group):
    """A Click group with a default command: `bottega jobs -n 5` means `bottega jobs list -n 5`."""

    default_command = "list"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)
