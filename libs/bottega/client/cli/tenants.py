"""`bottega tenants`: who may call a gateway that asks for API keys. Writes its file of tenants; asks no service."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bottega.client.cli.options import ListGroup
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say
from bottega.rpc.security.grants import MAX_GRANTED, MAX_NAME_CHARACTERS
from bottega.rpc.security.weights import LEAST_WEIGHT, MOST_WEIGHT
from bottega.state_folder import operator_folder

if TYPE_CHECKING:
    from bottega.rpc.security.tenant_file import Tenant

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_Tenants = tuple["Tenant", ...]


def _file_option(command: CommandT) -> CommandT:
    return click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="BOTTEGA_TENANTS",
        show_envvar=True,
        default=lambda: operator_folder() / "tenants.json",
        metavar="FILE",
        help="That of the gateway's configuration (tenants: FILE); default: tenants.json in /etc/bottega where you"
        " may write there, else in the state folder.",
    )(command)


@click.group("tenants", cls=ListGroup)
def command() -> None:
    """Name the tenants of a gateway, and make their API keys.

    \b
      bottega tenants add shop                 says its key, once
      bottega tenants rotate shop              says a new one
      bottega tenants quota shop --queued 100 --per-day 5000
      bottega tenants allow shop --models miniature --loras striped,dusk
      bottega tenants disable shop

    The gateway reads the file that `tenants` names in its configuration, and again within a second when it changes. A
    caller shows its key with BOTTEGA_API_KEY, Client(api_key=...), or metadata `authorization: Bearer KEY`.
    """


_WEIGHT = click.FloatRange(LEAST_WEIGHT, MOST_WEIGHT)


@command.command("add")
@click.argument("name")
@click.option("--weight", type=_WEIGHT, default=1.0, help="Of its share while several tenants' jobs wait (default: 1).")
@_file_option
def add(*, name: str, weight: float, file: Path) -> None:
    """Add a tenant. Its key is printed once; the file keeps a hash of it."""
    from bottega.rpc.security.api_keys import new_key
    from bottega.rpc.security.tenant_file import MAX_TENANTS, NAME_RULE, Tenant, change_tenants, is_tenant_name

    if not is_tenant_name(name):
        fail("that is no name for a tenant", f"A name has {NAME_RULE}.", status=2)
    key, parts = new_key()

    def added(tenants: _Tenants) -> _Tenants:
        if any(tenant.name == name for tenant in tenants):
            fail(f"there is a tenant {name} already", f"A new key for it: bottega tenants rotate {name}")
        if len(tenants) >= MAX_TENANTS:
            fail(f"there are {len(tenants)} tenants, which is all that a file may have")
        return (*tenants, Tenant(name=name, weight=weight).rotated(parts, keep_old=False))

    change_tenants(file, added)
    _show(key, f"{name} is a tenant of gateways that have `tenants: {file}`. Its key, which is shown only now:")


@command.command("list")
@_file_option
def list_tenants(*, file: Path) -> None:
    """List the tenants, and the public parts of their keys."""
    from bottega.rpc.security.tenant_file import read_tenants

    tenants = read_tenants(file)
    if not tenants:
        note("No tenant is there; bottega tenants add NAME adds one.")
        return
    table = PlainTable(
        "tenant", "state", "weight", "keys", "quotas", "may use", wraps=("quotas",), optional=("weight", "keys")
    )
    for tenant in tenants:
        keys = ", ".join(f"btg_{key.key_id}" for key in tenant.keys)
        quotas = ", ".join(f"{name} {most}" for name, most in dataclasses.asdict(tenant.quotas).items() if most)
        state = "disabled" if tenant.disabled else "enabled"
        grants = dataclasses.asdict(tenant.grants).items()
        granted = ", ".join(f"{kind} {' '.join(names)}" for kind, names in grants if names)
        table.add_row(tenant.name, state, f"{tenant.weight:g}", keys, quotas or "none", granted or "all")
    print_table(table)


@command.command("rotate")
@click.argument("name")
@click.option("--keep-old", is_flag=True, help="The key before it stays good too, until the next rotation.")
@_file_option
def rotate(*, name: str, keep_old: bool, file: Path) -> None:
    """Make a new key for a tenant, in place of its keys."""
    from bottega.rpc.security.api_keys import new_key
    from bottega.rpc.security.tenant_file import change_tenants

    key, parts = new_key()
    change_tenants(file, _changing(name, lambda tenant: tenant.rotated(parts, keep_old=keep_old)))
    old = "the one before it stays good" if keep_old else "no other is good any more"
    _show(key, f"The new key of {name}, which is shown only now; {old}:")


@command.command("weight")
@click.argument("name")
@click.argument("weight", type=_WEIGHT)
@_file_option
def change_weight(*, name: str, weight: float, file: Path) -> None:
    """Change a tenant's share of the workers while several tenants' jobs wait: 3 is three times that of 1."""
    from bottega.rpc.security.tenant_file import change_tenants

    change_tenants(file, _changing(name, lambda tenant: dataclasses.replace(tenant, weight=weight)))
    say(f"{name} weighs {weight:g}")


def _quota(name: str, help_text: str) -> Callable[[CommandT], CommandT]:
    return click.option(f"--{name}", type=click.IntRange(min=0), default=None, help=f"{help_text}; 0 is without bound.")


@command.command("quota")
@click.argument("name")
@_quota("concurrent", "Jobs that run at once; others of it wait")
@_quota("queued", "Jobs that wait")
@_quota("per-minute", "New jobs a minute")
@_quota("per-day", "New jobs a day, by UTC")
@_quota("stored-bytes", "Bytes of its pictures that are stored")
@_quota("calls", "Calls with one answer that a gateway serves at once")
@_quota("streams", "Calls with many answers that a gateway serves at once")
@_file_option
def change_quotas(*, name: str, file: Path, **quotas: int | None) -> None:
    """Change what a tenant may have at most; what is not named stays as it is."""
    from bottega.rpc.security.tenant_file import change_tenants

    given = {quota: most for quota, most in quotas.items() if most is not None}
    if not given:
        fail("say which quota: --queued 100, for example", "bottega tenants list shows those that are set.", status=2)
    change_tenants(file, _changing(name, _replacing("quotas", given)))
    said = ", ".join(f"{quota} {most or 'without bound'}" for quota, most in given.items())
    say(f"{name}: {said}")


def _names(_ctx: click.Context, option: click.Parameter, said: str | None) -> tuple[str, ...] | None:
    """Names between commas; none for an empty text."""
    if said is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in said.split(","))) if said.strip() else ()
    for name in names:
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise click.BadParameter(f"{name!r} is no name.")
        if "@" in name and option.name != "models":
            raise click.BadParameter(f"{name} is a tenant's own, for that tenant alone; name what is for all.")
    if len(names) > MAX_GRANTED:
        raise click.BadParameter(f"at most {MAX_GRANTED} names; given: {len(names)}.")
    return names


def _granted(kind: str, help_text: str) -> Callable[[CommandT], CommandT]:
    return click.option(f"--{kind}", callback=_names, metavar="NAME,...", help=f'{help_text}; "" is all of them.')


@command.command("allow")
@click.argument("name")
@_granted("models", "Models that it may use")
@_granted("loras", "LoRAs for all that it may use, beside its own")
@_granted("controlnets", "ControlNets for all that it may use, beside its own")
@_file_option
def change_grants(*, name: str, file: Path, **grants: tuple[str, ...] | None) -> None:
    """Change what a tenant may use of that which is for all tenants; what is not named stays as it is.

    For it there is nothing else then. A LoRA or ControlNet NAME@shop is shop's own: it is there for shop, as NAME, and
    for no other tenant.
    """
    from bottega.rpc.security.tenant_file import change_tenants

    given = {kind: names for kind, names in grants.items() if names is not None}
    if not given:
        fail("say what it may use: --models a,b, for example", "bottega tenants list shows what is allowed.", status=2)
    change_tenants(file, _changing(name, _replacing("grants", given)))
    said = ", ".join(f"{kind} {' '.join(names) or 'all'}" for kind, names in given.items())
    say(f"{name} may use: {said}")


def _replacing(part: str, given: Mapping[str, Any]) -> Callable[[Tenant], Tenant]:
    """Has a part of a tenant, its quotas or its grants, say this of what is given, and the same of all else."""
    return lambda tenant: dataclasses.replace(tenant, **{part: dataclasses.replace(getattr(tenant, part), **given)})


@command.command("disable")
@click.argument("name")
@click.option("--undo", is_flag=True, help="Enable it again; its keys are those that it had.")
@_file_option
def disable(*, name: str, undo: bool, file: Path) -> None:
    """Refuse a tenant's calls; what is its own stays. Calls that are being served go on."""
    from bottega.rpc.security.tenant_file import change_tenants

    change_tenants(file, _changing(name, lambda tenant: dataclasses.replace(tenant, disabled=not undo)))
    say(f"{name} {'enabled' if undo else 'disabled'}")


def _changing(name: str, change: Callable[[Tenant], Tenant]) -> Callable[[_Tenants], _Tenants]:
    def changed(tenants: _Tenants) -> _Tenants:
        if all(tenant.name != name for tenant in tenants):
            known = ", ".join(tenant.name for tenant in tenants) or "none"
            fail("there is no such tenant", f"There are: {known}", status=2)
        return tuple(change(tenant) if tenant.name == name else tenant for tenant in tenants)

    return changed


def _show(key: str, about: str) -> None:
    """The key alone goes to stdout, so that a script can take it."""
    note(about)
    say(key)
