"""The state folder that a command works in, as an option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bottega.client.instance import StateFolder
from bottega.state_folder import state_folder

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def state_option(command: CommandT) -> CommandT:
    """Adds --state, which gives the command a StateFolder as `state`."""
    return click.option(
        "--state",
        type=click.Path(file_okay=False, path_type=Path),
        default=None,
        callback=_folder,
        metavar="FOLDER",
        help="Folder for logs and state; default: $BOTTEGA_STATE, else ~/.local/state/bottega.",
    )(command)


def _folder(ctx: click.Context, _: click.Parameter, value: Path | None) -> object:
    return StateFolder(value or state_folder())
