"""`bottega controlnets`: which ControlNets are served, where they are loaded, and how to add one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from bottega.client.addons.controlnets.types import AddedControlNet, ServedControlNet
from bottega.client.cli.adapters import ask_as_operator
from bottega.client.cli.controlnets.profile import command as profile_command
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.list_group import ListGroup
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say, short_hash, size_text

_HUB = "hub:"


@click.group("controlnets", cls=ListGroup)
def command() -> None:
    """Look after ControlNets: list, where, add, profile.

    \b
      bottega controlnets                               those that are served, and for which models
      bottega controlnets where edges                   who has it, and whether it is loaded there
      bottega controlnets add depth /srv/nets/depth     every ControlNet server hosts it from now on
      bottega controlnets profile depth *.png           measures whether it may run one step behind
      bottega generate "a red star" --control edges=edges.png:0.8
    """


@command.command("list")
@address_option
@fleet_option
def list_command(*, address: str) -> None:
    """List the ControlNets that are served now; for a tenant, those that it may use."""
    with connect(address) as client:
        nets = ask_as_operator(client, "controlnet", client.controlnets)
    if nets is None:
        return
    if not nets:
        note("Nobody hosts a ControlNet; bottega fleet shows whether a ControlNet server has joined.")
        return
    table = PlainTable(
        "controlnet",
        ">size",
        "for",
        "loaded at",
        ">hosts",
        ">popularity",
        ">similarity",
        wraps=("for", "loaded at"),
        optional=("similarity", "popularity", "size"),
    )
    for net in nets:
        table.add_row(*_row(net))
    print_table(table)
    _note_versions(nets)


@command.command("where")
@click.argument("name")
@address_option
@fleet_option
def where(*, name: str, address: str) -> None:
    """Say who has the ControlNet NAME, and whether it is loaded there."""
    with connect(address) as client:
        nets = client.controlnets()
    found = [net for net in nets if net.name == name]
    if not found:
        names = ", ".join(sorted({net.name for net in nets}))
        fail(
            f"nobody hosts {name}", f"Hosted: {names}" if names else "No ControlNet is hosted; bottega fleet says more."
        )
    table = PlainTable(
        "host",
        "kind",
        "address",
        "state",
        ">sessions",
        ">popularity",
        "hash",
        optional=("hash", "popularity", "kind"),
    )
    for net in found:
        for host in net.hosts:
            kind = "controlnet" if host.server else "worker"
            facts = (host.readiness.value, str(host.sessions), str(host.popularity), short_hash(net.digest))
            table.add_row(host.name, kind, host.address, *facts)
    print_table(table)
    _note_versions(found)


@command.command("add")
@click.argument("name")
@click.argument("folder", metavar="FOLDER|hub:OWNER/NAME")
@click.option("--server", metavar="NAME", help="Only this server, as bottega fleet lists it; default: all of them.")
@click.option("--revision", metavar="NAME", help="Revision to download from the hub; default: the newest.")
@address_option
@fleet_option
def add(*, name: str, folder: str, server: str | None, revision: str | None, address: str) -> None:
    """Have ControlNet servers host one more, as NAME; NAME@TENANT is for that tenant alone, who calls it NAME.

    FOLDER is in Diffusers' layout (config.json, diffusion_pytorch_model.safetensors) on the servers' machines, below
    the root that their configuration allows; what is not absolute counts from here, else from that root.
    hub:OWNER/NAME is downloaded to a folder of its own below that root first, from the servers' machine.
    """
    on_hub = folder.startswith(_HUB)
    if revision is not None and not on_hub:
        raise click.UsageError(f"--revision is of what comes from the hub: {_HUB}OWNER/NAME")
    with connect(address) as client:
        if on_hub:
            folder = _fetch_from_hub(folder.removeprefix(_HUB), revision, client.controlnet_root(server=server))
        here = Path(folder)
        added = client.add_controlnet(name, str(here.resolve()) if here.is_dir() else folder, server=server)
    for one in added:
        if one.error is None:
            say(f"{one.server} hosts {name}, {size_text(one.size_bytes)}")
    _fail_where_refused(name, added)


command.add_command(profile_command)


def _fetch_from_hub(repo: str, revision: str | None, root: str) -> str:
    from bottega.client.addons.controlnets.hub import HubError, fetch

    try:
        return str(fetch(repo, revision, Path(root)))
    except HubError as error:
        fail(error.message, error.todo)


def _row(net: ServedControlNet) -> tuple[str, ...]:
    return (
        net.name,
        size_text(net.size_bytes),
        ", ".join(net.models) or f"no model here ({net.base})",
        ", ".join(net.loaded_at) or "nobody",
        str(len(net.hosts)),
        str(net.popularity),
        " ".join(f"{profile.similarity:.4f}" for profile in net.profiles) or "-",
    )


def _note_versions(nets: Sequence[ServedControlNet]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for net in nets:
        other = seen.setdefault((net.name, net.base), net.digest)
        if other != net.digest:
            hosts = ", ".join(host.name for host in net.hosts)
            note(f"{net.name} is another one at {hosts} than elsewhere; a picture never mixes the two.")


def _fail_where_refused(name: str, added: Sequence[AddedControlNet]) -> None:
    from bottega.client.cli.error_help import exit_status

    failures = [(one.server, one.error) for one in added if one.error is not None]
    if failures:
        lines = [(f"{server}: {error.message}",) for server, error in failures]
        fail(f"{name} is not hosted everywhere", lines, status=exit_status(failures[0][1]))
