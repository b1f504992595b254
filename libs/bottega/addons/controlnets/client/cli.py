"""`bottega controlnets`, and what ControlNets add to other commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from bottega import errors
from bottega.adapter_rules import mode_names
from bottega.addons.controlnets.client.cli_options import (
    CONTROL,
    describe_uses,
    merge_controlnets,
    name_as_given,
    warn_of_images,
)
from bottega.addons.controlnets.client.types import AddedControlNet, MeasuredProfile, ProfileCase, ServedControlNet
from bottega.addons.controlnets.planning import LEAST_SIMILARITY
from bottega.client.cli.addons import GenerationPart, ask_as_operator
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option, with_examples
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say, short_hash, size_text
from bottega.client.sdk.clients import Client
from bottega.errors import BottegaError
from bottega.miniature import MODELS

_HUB = "hub:"


@click.group("controlnets", cls=ListGroup)
@with_examples("""
    bottega controlnets                           lists them with their models
    bottega controlnets where edges               shows who hosts it
    bottega controlnets add depth /srv/nets/depth has every server host it
    bottega controlnets warm edges --servers 2    has two servers load it
    bottega controlnets pin edges                 keeps it in memory
    bottega controlnets profile depth *.png       measures if it may be late
    bottega generate "a red star" --control edges=edges.png:0.8
    bottega generate "a cat" --control union:depth=depth.png
""")
def command() -> None:
    """List, add, load and measure ControlNets."""


@command.command("list")
@address_option
@fleet_option
def list_command(*, address: str) -> None:
    """List the ControlNets that you may use.

    Operators see all ControlNets with their hosts; tenants see those that they may use.
    """
    with connect(address) as client:
        nets = ask_as_operator(client, "controlnet", client.controlnets)
    if nets is None:
        return
    if not nets:
        note("No ControlNet is hosted; bottega fleet shows whether a ControlNet server has joined.")
        return
    unions = ["modes"] if any(net.control_modes for net in nets) else []
    table = PlainTable(
        "controlnet",
        *unions,
        ">size",
        "for",
        "loaded at",
        ">hosts",
        ">popularity",
        ">similarity",
        wraps=("for", "loaded at", *unions),
        optional=("similarity", "popularity", "size"),
    )
    for net in nets:
        modes = [mode_names(net.control_modes, net.base) or "-"] if unions else []
        table.add_row(net.name, *modes, *_facts(net))
    print_table(table)
    _note_versions(nets)


@command.command("where")
@click.argument("name")
@address_option
@fleet_option
def where(*, name: str, address: str) -> None:
    """Show the services that host the ControlNet NAME."""
    with connect(address) as client:
        nets = client.controlnets()
    found = [net for net in nets if net.name == name]
    if not found:
        names = ", ".join(sorted({net.name for net in nets}))
        fail(f"no service hosts {name}", f"Hosted: {names}" if names else "No ControlNet is hosted; see bottega fleet.")
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
            state = f"{host.readiness.value}, pinned" if host.pinned else host.readiness.value
            facts = (state, str(host.sessions), str(host.popularity), short_hash(net.digest))
            table.add_row(host.name, kind, host.address, *facts)
    print_table(table)
    _note_versions(found)


@command.command("add")
@click.argument("name")
@click.argument("folder", metavar="FOLDER|hub:OWNER/NAME")
@click.option("--server", metavar="NAME", help="Use only this server, as bottega fleet lists it; default: all.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit to download from the hub; default: the newest.")
@address_option
@fleet_option
def add(*, name: str, folder: str, server: str | None, revision: str | None, address: str) -> None:
    """Make ControlNet servers host a ControlNet as NAME.

    A ControlNet NAME@TENANT belongs to that tenant alone, which calls it NAME.

    FOLDER has Diffusers' layout (config.json, diffusion_pytorch_model.safetensors). It is on the servers' machines,
    below the root folder that their configuration allows. A relative FOLDER is looked for here first, then below that
    root.

    hub:OWNER/NAME is first downloaded to a folder below that root; run this on the servers' machine.
    """
    on_hub = folder.startswith(_HUB)
    if revision is not None and not on_hub:
        raise click.UsageError(f"--revision needs {_HUB}OWNER/NAME")
    with connect(address) as client:
        if on_hub:
            folder = _fetch_from_hub(folder.removeprefix(_HUB), revision, client.controlnet_root(server=server))
        here = Path(folder)
        added = client.add_controlnet(name, str(here.resolve()) if here.is_dir() else folder, server=server)
    for one in added:
        if one.error is None:
            say(f"{one.server} hosts {name}, {size_text(one.size_bytes)}")
            if one.catalogue:
                note(f"Other servers that share the catalogue {one.catalogue} host it soon, too.")
    _fail_where_refused(name, added)


@command.command("warm")
@click.argument("name")
@click.option(
    "--servers", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of servers that load it."
)
@address_option
@fleet_option
def warm(*, name: str, servers: int, address: str) -> None:
    """Load the ControlNet NAME before requests need it.

    Servers that have loaded it already count. The others are those with the most memory to spare. It stays in memory
    until other ControlNets need the room; bottega controlnets pin keeps it.
    """
    with connect(address) as client:
        loaded = client.warm_controlnet(name, servers=servers)
    if len(loaded) < servers:
        fail(f"{len(loaded)} of {servers} servers have loaded {name}", f"bottega controlnets where {name}")
    say(f"{name} is loaded at {', '.join(loaded)}")


@command.command("pin")
@click.argument("name")
@click.option("--server", metavar="NAME", help="Use only this server, as bottega fleet lists it; default: all.")
@address_option
@fleet_option
def pin(*, name: str, server: str | None, address: str) -> None:
    """Keep a ControlNet in memory, also after a restart.

    It is evicted only if requests for other ControlNets cannot be served otherwise, and loaded again afterwards.
    """
    with connect(address) as client:
        say(f"{name} is pinned at {', '.join(client.pin_controlnet(name, server=server))}")


@command.command("unpin")
@click.argument("name")
@click.option("--server", metavar="NAME", help="Use only this server, as bottega fleet lists it; default: all.")
@address_option
@fleet_option
def unpin(*, name: str, server: str | None, address: str) -> None:
    """Let servers evict the ControlNet NAME again."""
    with connect(address) as client:
        say(f"{name} is not pinned any more at {', '.join(client.pin_controlnet(name, pinned=False, server=server))}")


def _fetch_from_hub(repo: str, revision: str | None, root: str) -> str:
    from bottega.addons.controlnets.client.hub import HubError, fetch

    try:
        return str(fetch(repo, revision, Path(root)))
    except HubError as error:
        fail(error.message, error.todo)


def _facts(net: ServedControlNet) -> tuple[str, ...]:
    return (
        size_text(net.size_bytes),
        ", ".join(net.models) or f"no served model ({net.base})",
        ", ".join(net.loaded_at) or "-",
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
            note(f"{hosts} host another version of {net.name} than others do; a picture never mixes the two.")


def _fail_where_refused(name: str, added: Sequence[AddedControlNet]) -> None:
    from bottega.client.cli.error_help import exit_status

    failures = [(one.server, one.error) for one in added if one.error is not None]
    if failures:
        lines = [(f"{server}: {error.message}",) for server, error in failures]
        fail(f"{name} is not hosted everywhere", lines, status=exit_status(failures[0][1]))


# Scenes of the embedded model: measurements with four differ in the fourth decimal.
_SCENES = 4


@command.command("profile")
@click.argument("name")
@click.argument("images", nargs=-1, metavar="[IMAGE]...", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt", default="", help="Prompt that is drawn with each IMAGE; default: an empty one.")
@click.option("--mode", help="What the images show, if NAME is a union, such as depth.")
@click.option(
    "--steps",
    type=click.IntRange(2, 200),
    help="Denoising steps of each picture. Give the fewest that your requests use; default: the model's.",
)
@click.option("--model", help="Model to measure with; default: the only one that is served.")
@address_option
@fleet_option
def profile(
    *,
    name: str,
    images: Sequence[Path],
    prompt: str,
    mode: str | None,
    steps: int | None,
    model: str | None,
    address: str,
) -> None:
    """Measure whether residuals of NAME may be a step old.

    The command draws a picture with each control IMAGE. Give five of the kind that you use; the embedded model's own
    ControlNets need none. The servers of NAME store the lowest cosine, over the pictures, between residuals of adjacent
    steps. From .99 on, requests that allow approximations may use the residuals of the previous step instead of
    waiting.
    """
    with connect(address) as client:
        given = [ProfileCase(prompt=prompt, image=image, control_mode=mode) for image in images]
        cases = given or [*_scenes(client, name, model)]
        note(f"drawing {len(cases)} pictures ...")
        measured = client.profile_controlnet(
            name, cases, num_inference_steps=steps, model=model, on_picture=lambda found: note(f"  {found:.4f}")
        )
    _report(name, measured)


def _scenes(client: Client, name: str, model: str | None) -> Iterator[ProfileCase]:
    """Yield pictures to measure an embedded model's ControlNets with. Raise UsageError for others."""
    import random

    from bottega.miniature.scenes import DRAWN, caption, held_out_scenes, random_layout

    served = [one.name for one in client.models() if model in (None, one.name)]
    if len(served) != 1 or served[0] not in MODELS or name not in DRAWN:
        raise click.UsageError(
            f"give control images of the kind that {name} is used with: bottega controlnets profile {name} IMAGE..."
        )
    rng = random.Random(0)
    for scene in held_out_scenes(_SCENES, things=1):
        yield ProfileCase(prompt=caption(scene), image=DRAWN[name](random_layout(scene, rng)))


def _report(name: str, measured: MeasuredProfile) -> None:
    profile, servers = measured.profile, ", ".join(measured.servers)
    steps = profile.num_inference_steps
    say(f"{name}: cosine {profile.similarity:.4f} from step to step, with {steps} steps; kept by {servers}")
    if profile.similarity >= LEAST_SIMILARITY:
        note(f"Requests of at least {steps} steps that allow approximations (no seed, or --fidelity balanced) may use")
        note("residuals that are one step old instead of waiting. Their provenance says if they did.")
    else:
        note(f"This is below {LEAST_SIMILARITY:g}, so every step waits for its own residuals.")


PART = GenerationPart(
    options=(
        CONTROL,
        click.option(
            "--stale-residuals/--no-stale-residuals",
            default=None,
            help="Use residuals of the previous step instead of waiting for a server (approximate). "
            "Default: by --fidelity.",
        ),
    ),
    inputs=(CONTROL,),
    stage="controlnets",
    describe=describe_uses,
    warn=warn_of_images,
    merge=merge_controlnets,
    rename=name_as_given,
    approximations=("stale_residuals",),
)


_BY_CLASS = {
    errors.ControlNetNotFound: "bottega controlnets lists what is served.",
    errors.ControlNetUnusable: "bottega controlnets lists the models that each fits; bottega models what is served.",
    errors.ControlNetExists: "Add it under another name; bottega controlnets lists the names in use.",
    errors.NoControlNet: "bottega controlnets lists the hosts; bottega logs says why a server is missing.",
}
_BY_LIMIT = {
    "budget_bytes": "Ask for fewer ControlNets at once, or raise engine.budget_bytes of the servers that host them.",
    "controlnets": "Host it on another ControlNet server.",
}


def advice_for(error: BottegaError) -> str | None:
    """Return advice about an error of ControlNets; None for other errors."""
    if isinstance(error, errors.TooLarge):
        return _BY_LIMIT.get(error.metadata.get("limit", ""))
    if isinstance(error, errors.NotFinite) and error.metadata.get("controlnets"):
        return "Try smaller scales (--control NAME=IMAGE:SCALE), only one of the ControlNets, or none."
    return _BY_CLASS.get(type(error))
