"""Options and a group class that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from bottega.client.instance import StateFolder
from bottega.client.sdk.clients import Client
from bottega.client.transport.address import default_address
from bottega.client.transport.retry import RetryPolicy
from bottega.state_folder import state_folder

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

# Long enough for a gateway that restarts, short enough for a person who forgot to start one.
_REACH_S = 5.0
DEFAULT_TIMEOUT_S = 600.0

_KEY = "bottega.gateway_choice"


@dataclass(slots=True, kw_only=True)
class GatewayChoice:
    """What a command was given or found, for its calls and for what is said about their errors.

    address: of the gateway. fleet_address: None where none was given. timeout_advice: what to do where the command's
    time was too short; empty where it takes no time-out.
    """

    address: str = ""
    fleet_address: str | None = None
    timeout_advice: str = ""


def gateway_choice(ctx: click.Context) -> GatewayChoice:
    """That of the command that runs."""
    choice: GatewayChoice = ctx.meta.setdefault(_KEY, GatewayChoice())
    return choice


def address_option(command: CommandT) -> CommandT:
    """Adds --address."""
    return click.option(
        "--address",
        envvar="BOTTEGA_ADDRESS",
        show_envvar=True,
        metavar="HOST:PORT",
        callback=_choose_address,
        help="Gateway to ask; default: the suite that runs here, else 127.0.0.1:8470.",
    )(command)


def fleet_option(command: CommandT) -> CommandT:
    """Adds --fleet-address, for commands that ask who has joined; `connect` knows it."""
    return click.option(
        "--fleet-address",
        envvar="BOTTEGA_FLEET",
        show_envvar=True,
        metavar="HOST:PORT",
        expose_value=False,
        callback=_note_fleet_address,
        help="Where the gateway lists its services; default: the suite that runs here, else port 8472 of --address.",
    )(command)


def timeout_option(command: CommandT) -> CommandT:
    """Adds --timeout, which gives the command `timeout_s`."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0.0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        callback=_note_timeout,
        help="Seconds to wait in all.",
    )(command)


def connect(address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Client:
    """A client as patient as a person."""
    fleet_address = gateway_choice(click.get_current_context()).fleet_address
    return Client(address, fleet_address=fleet_address, timeout_s=timeout_s, retry=RetryPolicy(reach_s=_REACH_S))


def _note_timeout(ctx: click.Context, _: click.Parameter, value: float) -> float:
    gateway_choice(ctx).timeout_advice = "Allow more time with --timeout SECONDS."
    return value


def _note_fleet_address(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    gateway_choice(ctx).fleet_address = value or None


def _choose_address(ctx: click.Context, _: click.Parameter, value: str | None) -> str:
    address = value or default_address()
    gateway_choice(ctx).address = address
    return address


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


class ListGroup(click.Group):
    """A Click group with a default command: `bottega jobs -n 5` means `bottega jobs list -n 5`."""

    default_command = "list"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)
