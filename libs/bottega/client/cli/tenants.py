"""`bottega tenants`: edits a gateway's file of tenants and their API keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from bottega.client.cli.options import ListGroup, with_examples
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say
from bottega.rpc.security.caller import LEAST_WEIGHT, MAX_GRANTED, MAX_NAME_CHARACTERS, MOST_WEIGHT
from bottega.state_folder import operator_folder

if TYPE_CHECKING:
    from bottega.rpc.security.tenant_file import Tenant, WebhookEventName

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_Tenants = tuple["Tenant", ...]
_DATABASE = ("postgresql://", "postgres://")


def _file_option(command: CommandT) -> CommandT:
    return click.option(
        "--file",
        envvar="BOTTEGA_TENANTS",
        show_envvar=True,
        default=lambda: str(operator_folder() / "tenants.json"),
        metavar="FILE",
        help="What `tenants` in the gateway's configuration names: a file, or the URL of a database (postgresql://...)."
        " Default: tenants.json in /etc/bottega if you may write there, else in the state folder.",
    )(command)


@click.group("tenants", cls=ListGroup)
@with_examples("""
    bottega tenants add shop       prints its key, once
    bottega tenants rotate shop    prints a new key
    bottega tenants quota shop --queued 100 --per-day 5000
    bottega tenants allow shop --models miniature --loras striped,dusk
    bottega tenants webhook shop --url https://shop.example/hooks
    bottega tenants disable shop
    bottega tenants import tenants.json --file postgresql://db/bottega
""")
def command() -> None:
    """Manage the tenants of a gateway and their API keys.

    They are in a file, or in a PostgreSQL database for several gateways: `tenants` in their configuration names it.
    Gateways follow changes within seconds. Callers give their key with BOTTEGA_API_KEY, Client(api_key=...), or the
    gRPC metadata `authorization: Bearer KEY`.
    """


_WEIGHT = click.FloatRange(LEAST_WEIGHT, MOST_WEIGHT)


@command.command("add")
@click.argument("name")
@click.option(
    "--weight", type=_WEIGHT, default=1.0, help="Share of the workers, relative to other tenants (default: 1)."
)
@_file_option
def add(*, name: str, weight: float, file: str) -> None:
    """Add a tenant, and print its API key.

    The key is printed only now; only its hash is kept.
    """
    from bottega.rpc.security.api_keys import new_key
    from bottega.rpc.security.tenant_file import MAX_TENANTS, NAME_RULE, Tenant, is_tenant_name

    if not is_tenant_name(name):
        fail("this cannot be the name of a tenant", f"A name has {NAME_RULE}.", status=2)
    key, parts = new_key()

    def added(tenants: _Tenants) -> _Tenants:
        if any(tenant.name == name for tenant in tenants):
            fail(f"there is a tenant {name} already", f"bottega tenants rotate {name} makes a new key for it.")
        if len(tenants) >= MAX_TENANTS:
            fail(f"there are {len(tenants)} tenants, which is the maximum")
        return (*tenants, Tenant(name=name, weight=weight).rotated(parts, keep_old=False))

    _change(file, added)
    _show(key, f"{name} is a tenant of gateways with `tenants: {file}`. Its key, which is printed only now:")


@command.command("list")
@_file_option
def list_tenants(*, file: str) -> None:
    """List tenants with key IDs, quotas and grants."""
    tenants = _read(file)
    if not tenants:
        note("There are no tenants; bottega tenants add NAME adds one.")
        return
    table = PlainTable(
        "tenant",
        "state",
        "weight",
        "keys",
        "quotas",
        "may use",
        "webhook",
        wraps=("quotas",),
        optional=("weight", "keys", "webhook"),
    )
    for tenant in tenants:
        keys = ", ".join(f"btg_{key.key_id}" for key in tenant.keys)
        quotas = ", ".join(f"{name} {most}" for name, most in dataclasses.asdict(tenant.quotas).items() if most)
        state = "disabled" if tenant.disabled else "enabled"
        grants = dataclasses.asdict(tenant.grants).items()
        granted = ", ".join(f"{kind} {' '.join(names)}" for kind, names in grants if names)
        webhook = tenant.webhooks.url or ("of requests" if tenant.webhooks.secrets else "none")
        table.add_row(tenant.name, state, f"{tenant.weight:g}", keys, quotas or "none", granted or "all", webhook)
    print_table(table)


@command.command("import")
@click.argument("source", metavar="FILE")
@_file_option
def import_tenants(*, source: str, file: str) -> None:
    """Copy tenants from another file or database.

    They keep their keys and quotas. Tenants that exist already stay as they are.
    """
    known: set[str] = set()
    copied = _read(source)

    def added(tenants: _Tenants) -> _Tenants:
        known.update(tenant.name for tenant in tenants)
        return (*tenants, *(tenant for tenant in copied if tenant.name not in known))

    _change(file, added)
    kept = sorted(known & {tenant.name for tenant in copied})
    say(f"{len(copied) - len(kept)} of {len(copied)} tenants were copied")
    if kept:
        note(f"These exist already and stay as they are: {', '.join(kept)}")


@command.command("rotate")
@click.argument("name")
@click.option("--keep-old", is_flag=True, help="Keep the previous key valid until the next bottega tenants rotate.")
@_file_option
def rotate(*, name: str, keep_old: bool, file: str) -> None:
    """Make and print a new key for a tenant. Its other keys become invalid."""
    from bottega.rpc.security.api_keys import new_key

    key, parts = new_key()
    _change(file, _changing(name, lambda tenant: tenant.rotated(parts, keep_old=keep_old)))
    old = "the previous one stays valid" if keep_old else "no other one is valid"
    _show(key, f"The new key of {name}, which is printed only now; {old}:")


@command.command("weight")
@click.argument("name")
@click.argument("weight", type=_WEIGHT)
@_file_option
def change_weight(*, name: str, weight: float, file: str) -> None:
    """Change a tenant's share of the workers.

    Shares matter while jobs of several tenants wait: a tenant of weight 3 then gets three times as much of the workers
    as a tenant of weight 1.
    """
    _change(file, _changing(name, lambda tenant: dataclasses.replace(tenant, weight=weight)))
    say(f"{name} weighs {weight:g}")


def _quota(name: str, help_text: str) -> Callable[[CommandT], CommandT]:
    return click.option(f"--{name}", type=click.IntRange(min=0), default=None, help=f"{help_text}; 0 for no limit.")


@command.command("quota")
@click.argument("name")
@_quota("concurrent", "Maximum of jobs that run at once; more jobs wait")
@_quota("queued", "Maximum of jobs that wait")
@_quota("per-minute", "Maximum of new jobs per minute")
@_quota("per-day", "Maximum of new jobs per day (UTC)")
@_quota("stored-bytes", "Maximum size of the tenant's stored pictures, in bytes")
@_quota("calls", "Maximum of concurrent unary calls")
@_quota("streams", "Maximum of concurrent streaming calls")
@_file_option
def change_quotas(*, name: str, file: str, **quotas: int | None) -> None:
    """Change a tenant's quotas. Quotas that are not given stay as they are."""
    given = {quota: most for quota, most in quotas.items() if most is not None}
    if not given:
        fail("give a quota, such as --queued 100", "bottega tenants list shows the quotas that are set.", status=2)
    _change(file, _changing(name, _replacing("quotas", given)))
    quotas_text = ", ".join(f"{quota} {most or 'without limit'}" for quota, most in given.items())
    say(f"{name}: {quotas_text}")


@command.command("webhook")
@click.argument("name")
@click.option("--url", help='Where the ends of its jobs are announced if they name no webhook; "" for nowhere.')
@click.option(
    "--event",
    "events",
    multiple=True,
    type=click.Choice(("job.completed", "job.failed", "job.cancelled")),
    help="Type of events for --url; repeatable. Default: all.",
)
@click.option("--rotate", is_flag=True, help="Make a new secret. The previous one is not used any more.")
@click.option("--keep-old", is_flag=True, help="With --rotate, sign with the previous secret, too, until the next.")
@_file_option
def change_webhook(
    *, name: str, url: str | None, events: tuple[str, ...], rotate: bool, keep_old: bool, file: str
) -> None:
    """Set a tenant's webhook and the secret that signs.

    A tenant without a secret gets one. A new secret is printed, for the tenant's receivers. The gateway calls hosts
    that webhooks.hosts of its configuration lists.
    """
    if (events and url is None) or (keep_old and not rotate):
        raise click.UsageError("--event needs --url, and --keep-old needs --rotate.")
    new: list[str] = []

    def changed(tenant: Tenant) -> Tenant:
        webhooks = tenant.webhooks
        if url is not None:
            chosen = cast("tuple[WebhookEventName, ...]", events)
            webhooks = dataclasses.replace(webhooks, url=url, events=chosen)
        if rotate or not webhooks.secrets:
            webhooks = webhooks.rotated(keep_old=keep_old)
            new.append(webhooks.secrets[0])
        return dataclasses.replace(tenant, webhooks=webhooks)

    _change(file, _changing(name, changed))
    if url is not None:
        note(
            f"{name}: the ends of jobs are announced at {url}" if url else f"{name} has no webhook for all of its jobs"
        )
    for secret in new:
        _show(secret, f"The secret that signs the webhooks of {name}:")


def _names(_ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return the names in a list with commas; an empty tuple for an empty text, None without the option."""
    if value is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in value.split(","))) if value.strip() else ()
    for name in names:
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise click.BadParameter(f"{name!r} is no valid name.")
        if "@" in name and option.name != "models":
            raise click.BadParameter(f"{name} is for one tenant alone; give names that are for all.")
    if len(names) > MAX_GRANTED:
        raise click.BadParameter(f"at most {MAX_GRANTED} names; given: {len(names)}.")
    return names


def _granted(kind: str, help_text: str) -> Callable[[CommandT], CommandT]:
    return click.option(f"--{kind}", callback=_names, metavar="NAME,...", help=f'{help_text}; "" for all.')


@command.command("allow")
@click.argument("name")
@_granted("models", "Models that it may use")
@_granted("loras", "Shared LoRAs that it may use, beside its own")
@_granted("controlnets", "Shared ControlNets that it may use, beside its own")
@_file_option
def change_grants(*, name: str, file: str, **grants: tuple[str, ...] | None) -> None:
    """Restrict which models, LoRAs and ControlNets a tenant may use.

    The tenant cannot see others. A kind that is not given stays as it is. A LoRA or ControlNet NAME@shop needs no
    grant: it belongs to the tenant shop alone, which calls it NAME.
    """
    given = {kind: names for kind, names in grants.items() if names is not None}
    if not given:
        fail("give what it may use, such as --models a,b", "bottega tenants list shows what is allowed.", status=2)
    _change(file, _changing(name, _replacing("grants", given)))
    grants_text = ", ".join(f"{kind} {' '.join(names) or 'all'}" for kind, names in given.items())
    say(f"{name} may use: {grants_text}")


def _replacing(part: str, given: Mapping[str, Any]) -> Callable[[Tenant], Tenant]:
    """Return a function that changes the given fields of a tenant's `quotas` or `grants`, whichever `part` names."""
    return lambda tenant: dataclasses.replace(tenant, **{part: dataclasses.replace(getattr(tenant, part), **given)})


@command.command("disable")
@click.argument("name")
@click.option("--undo", is_flag=True, help="Enable it again, with its earlier keys.")
@_file_option
def disable(*, name: str, undo: bool, file: str) -> None:
    """Refuse new calls of a tenant, but keep its data.

    Calls that are being served go on.
    """
    _change(file, _changing(name, lambda tenant: dataclasses.replace(tenant, disabled=not undo)))
    say(f"{name} enabled" if undo else f"{name} disabled; bottega tenants disable {name} --undo enables it again")


def _read(file: str) -> _Tenants:
    """Return the tenants in a file or database."""
    from bottega.rpc.security.tenant_file import read_tenants

    if not file.startswith(_DATABASE):
        return read_tenants(Path(file))
    from bottega.rpc.security.tenant_table import read_table

    return read_table(file)


def _change(file: str, change: Callable[[_Tenants], _Tenants]) -> None:
    """Change the tenants in a file or database."""
    from bottega.rpc.security.tenant_file import change_tenants

    if not file.startswith(_DATABASE):
        change_tenants(Path(file), change)
        return
    from bottega.rpc.security.tenant_table import change_table

    change_table(file, change)


def _changing(name: str, change: Callable[[Tenant], Tenant]) -> Callable[[_Tenants], _Tenants]:
    def changed(tenants: _Tenants) -> _Tenants:
        if all(tenant.name != name for tenant in tenants):
            known = ", ".join(tenant.name for tenant in tenants) or "none"
            fail(f"there is no tenant {name}", f"Tenants: {known}", status=2)
        return tuple(change(tenant) if tenant.name == name else tenant for tenant in tenants)

    return changed


def _show(key: str, about: str) -> None:
    """Print the key alone on stdout, so that scripts can read it."""
    note(about)
    say(key)
