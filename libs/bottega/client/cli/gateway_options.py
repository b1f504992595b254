"""The gateway that a command talks to. Knows its options, and how patient a person is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from bottega.client.sdk.clients import Client

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

# Long enough for a gateway that restarts, short enough for a person who forgot to start one.
_REACH_S = 5.0
DEFAULT_TIMEOUT_S = 600.0

_KEY = "bottega.address"
_FLEET_KEY = "bottega.fleet_address"
_LATE_KEY = "bottega.when_late"


def address_option(command: CommandT) -> CommandT:
    """Adds --address."""
    return click.option(
        "--address",
        envvar="BOTTEGA_ADDRESS",
        show_envvar=True,
        metavar="HOST:PORT",
        callback=_chosen,
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
        callback=_noted_fleet,
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
        callback=_noted,
        help="Seconds to wait in all.",
    )(command)


def connect(address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Client:
    """A client as patient as a person."""
    from bottega.client.sdk.clients import Client
    from bottega.client.transport.retry import RetryPolicy

    fleet_address = asked_fleet_address(click.get_current_context())
    return Client(address, fleet_address=fleet_address, timeout_s=timeout_s, retry=RetryPolicy(reach_s=_REACH_S))


def asked_address(ctx: click.Context) -> str:
    """The address that the command was given, for what is said about its errors."""
    return str(ctx.meta.get(_KEY, ""))


def asked_fleet_address(ctx: click.Context) -> str | None:
    """Where the command was told to ask for the fleet, if it was."""
    said: str | None = ctx.meta.get(_FLEET_KEY)
    return said


def advise_when_late(ctx: click.Context, advice: str) -> None:
    """What the command says to do where its time was too short."""
    ctx.meta[_LATE_KEY] = advice


def advice_when_late(ctx: click.Context) -> str:
    """What it said; empty where it has no say in its time."""
    return str(ctx.meta.get(_LATE_KEY, ""))


def _noted(ctx: click.Context, _: click.Parameter, value: float) -> float:
    advise_when_late(ctx, "Allow more time with --timeout SECONDS.")
    return value


def _noted_fleet(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    ctx.meta[_FLEET_KEY] = value or None


def _chosen(ctx: click.Context, _: click.Parameter, value: str | None) -> str:
    from bottega.client.suite.state import StateFolder
    from bottega.client.transport.address import default_address
    from bottega.state_folder import state_folder

    address = value or StateFolder(state_folder()).running_address() or default_address()
    ctx.meta[_KEY] = address
    return address
