"""A group of commands of which one needs no word: its options alone are those of its `list`, or of another one."""

from __future__ import annotations

import click


class ListGroup(click.Group):
    """`bottega jobs -n 5` means `bottega jobs list -n 5`. needs_no_word: the name of that command."""

    needs_no_word = "list"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.needs_no_word, *args]
        return super().parse_args(ctx, args)
