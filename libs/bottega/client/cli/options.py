"""Options, a group class and a block of examples that several commands share."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bottega.state_folder import state_folder

if TYPE_CHECKING:  # these import gRPC, which --help does without
    from bottega.client.sdk.clients import Client

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

# Seconds to reach a gateway: enough for one that restarts, not too many for a person who forgot to start one.
_REACH_S = 5.0
DEFAULT_TIMEOUT_S = 600.0

_KEY = "bottega.gateway_choice"


@dataclass(slots=True, kw_only=True)
class GatewayChoice:
    """The gateway that a command calls, and advice for when the call times out."""

    address: str = ""
    """host:port of the gateway."""
    fleet_address: str | None = None
    """host:port of the gateway's listener for services; None if --fleet-address was not given."""
    timeout_advice: str = ""
    """Advice for when the call times out; empty if the command has no time-out."""


def gateway_choice(ctx: click.Context) -> GatewayChoice:
    """Return the GatewayChoice of the running command."""
    choice: GatewayChoice = ctx.meta.setdefault(_KEY, GatewayChoice())
    return choice


def address_option(command: CommandT) -> CommandT:
    """Add --address."""
    return click.option(
        "--address",
        envvar="BOTTEGA_ADDRESS",
        show_envvar=True,
        metavar="HOST:PORT",
        callback=_choose_address,
        help="Address of the gateway; default: that of the suite that runs on this machine, else 127.0.0.1:8470.",
    )(command)


def fleet_option(command: CommandT) -> CommandT:
    """Add --fleet-address, for commands that list the fleet; `connect` uses it."""
    return click.option(
        "--fleet-address",
        envvar="BOTTEGA_FLEET",
        show_envvar=True,
        metavar="HOST:PORT",
        expose_value=False,
        callback=_note_fleet_address,
        help="The gateway's listener for services; default: as for --address, else port 8472 of that host.",
    )(command)


def timeout_option(command: CommandT) -> CommandT:
    """Add --timeout, which is passed to the command as `timeout_s`."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0.0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        callback=_note_timeout,
        help="Time-out in seconds.",
    )(command)


def connect(address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Client:
    """Return a client that waits a few seconds for a gateway that does not answer."""
    from bottega.client.sdk.clients import Client
    from bottega.client.transport.calls import RetryPolicy

    fleet_address = gateway_choice(click.get_current_context()).fleet_address
    return Client(address, fleet_address=fleet_address, timeout_s=timeout_s, retry=RetryPolicy(reach_s=_REACH_S))


def _note_timeout(ctx: click.Context, _: click.Parameter, value: float) -> float:
    gateway_choice(ctx).timeout_advice = "Allow more time with --timeout SECONDS."
    return value


def _note_fleet_address(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    gateway_choice(ctx).fleet_address = value or None


def _choose_address(ctx: click.Context, _: click.Parameter, value: str | None) -> str:
    from bottega.client.transport.connection import default_address

    address = value or default_address()
    gateway_choice(ctx).address = address
    return address


def state_option(command: CommandT) -> CommandT:
    """Add --state, which is passed to the command as a StateFolder named `state`."""
    return click.option(
        "--state",
        type=click.Path(file_okay=False, path_type=Path),
        default=None,
        callback=_folder,
        metavar="FOLDER",
        help="Folder of the suite's logs and state; default: $BOTTEGA_STATE, else ~/.local/state/bottega.",
    )(command)


def _folder(ctx: click.Context, _: click.Parameter, value: Path | None) -> object:
    from bottega.client.instance import StateFolder

    return StateFolder(value or state_folder())


def with_examples(lines: str) -> Callable[[CommandT], CommandT]:
    """Add lines of examples to the help of a command, below its docstring."""

    def add(command: CommandT) -> CommandT:
        # Click keeps the lines of a paragraph that begins with this mark.
        block = textwrap.indent(inspect.cleandoc(lines), "  ")
        command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n\b\n{block}"
        return command

    return add


class ListGroup(click.Group):
    """A Click group with a default command: `bottega jobs -n 5` means `bottega jobs list -n 5`."""

    default_command = "list"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)
