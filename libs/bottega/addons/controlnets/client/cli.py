"""`bottega controlnets`, and what ControlNets add to other commands: options, output lines and advice."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from bottega import errors, rules
from bottega.addons.controlnets.client.types import AddedControlNet, MeasuredProfile, ProfileCase, ServedControlNet
from bottega.addons.controlnets.planning import LEAST_SIMILARITY
from bottega.client.cli.addons import GenerationPart, ask_as_operator
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option, with_examples
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say, short_hash, size_text
from bottega.client.sdk.clients import Client
from bottega.client.types.inputs import ControlNet
from bottega.client.types.models import EMBEDDED_MODEL
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import ControlNetUse, Provenance
from bottega.control_modes import list_modes, mode_name, mode_names, mode_number
from bottega.errors import BottegaError, Violation

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
        modes = [mode_names(net.control_modes) or "-"] if unions else []
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
    """Keep the ControlNet NAME in the memory of its servers, also after a restart.

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
    """Yield pictures to measure the embedded model's ControlNets with. Raise UsageError for others."""
    import random

    from bottega.miniature.scenes import DRAWN, caption, held_out_scenes, random_layout

    served = [one.name for one in client.models() if model in (None, one.name)]
    if served != [EMBEDDED_MODEL] or name not in DRAWN:
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


_SHORTEST_S = 0.0005


def _merge(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    if nets := merged(options.pop("controlnets", None) or (), given.pop("controlnets"), like):
        options["controlnets"] = nets


def _rename(violation: Violation, options: GenerationOptions) -> Violation:
    return name_as_given(violation, options.get("controlnets") or ())


def _describe(provenance: Provenance) -> Iterator[str]:
    for use in provenance.controlnets:
        yield f"control {use.name}: {', '.join(_use_facts(use, provenance.worker))}"
    if provenance.controlnets and provenance.encoder_s >= _SHORTEST_S:
        yield f"ControlNets ran during {provenance.encoder_s:.3f} s of the model's encoder"


def _warn(provenance: Provenance) -> Iterator[str]:
    for use in provenance.controlnets:
        image = f"the image of control {use.name}"
        if use.transparency_unread:
            yield f"{image} is partly transparent; its colours were used as if it were opaque"
        if use.scaled_from_16_bits:
            yield f"{image} has 16 bits of grey, which were scaled to 8 (Diffusers makes nearly all of these white)"


def _use_facts(use: ControlNetUse, worker: str) -> Iterator[str]:
    servers = ["the worker itself" if server == worker else server for server in use.servers]
    if servers:
        yield f"by {', then '.join(servers)}"
    if use.control_mode is not None:
        yield f"mode {mode_name(use.control_mode)}"
    yield f"scale {use.scale:g}"
    yield f"waited {use.waited_s:.3f} s for it"
    if use.stale_steps:
        yield f"{use.stale_steps} steps with residuals one step old (approximate)"
    if use.end_step and use.begin_step == use.end_step:
        yield "active in no step"


# The gateway's names for fields of a request's ControlNets.
_PLACE = re.compile(r"(?:spec\.)?controlnets\[(\d+)\]\.(\w+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlArgument:
    """The value of an option --control."""

    name: str
    mode: str | None = None
    """Control mode of a union; None if none was given."""
    file: Path
    scale: float | None
    """The scale; None if none was given."""


class ControlType(click.ParamType[ControlArgument]):
    """A Click type for a ControlNet, given as NAME[:MODE]=FILE[:SCALE]."""

    name = "control"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> ControlArgument:
        given_name, given, rest = value.partition("=")
        name, has_mode, mode = given_name.partition(":")
        if not given or not rest:
            self.fail(f"{value!r}: give NAME=FILE or NAME=FILE:SCALE, such as edges=edges.png:0.8", param, ctx)
        if not rules.is_adapter_name(name):
            self.fail(
                f"{name!r} is no name of a ControlNet (letters, digits and . _ / + -); bottega controlnets lists them",
                param,
                ctx,
            )
        if has_mode and mode_number(mode) is None:
            self.fail(f"{mode!r} is no control mode of a union; give one of {list_modes()}", param, ctx)
        colon = _colon_before_scale(rest)
        file, scale = Path(rest[:colon]), rest[colon + 1 :]
        if not file.exists():
            self.fail(f"{name}: there is no file {file}", param, ctx)
        if file.is_dir():
            self.fail(f"{name}: {file} is a folder; give an image file", param, ctx)
        number = _number(scale)
        if colon < len(rest) and number is None:
            self.fail(f"{name}: {scale!r} is no scale; give a number such as 0.8 after FILE:", param, ctx)
        return ControlArgument(name=name, mode=mode or None, file=file, scale=number)


def merged(then: Sequence[ControlNet], given: Sequence[ControlArgument], like: Path | None) -> list[ControlNet]:
    """Return the ControlNets of a request: those of an earlier picture with the images given now, then the others.

    Args:
        then: ControlNets of the earlier picture, without their images.
        given: Values of the options --control.
        like: File of the earlier picture.

    Raises:
        click.UsageError: The image of an earlier ControlNet was not given; PNG files do not contain it.
    """
    left = list(given)
    nets = []
    for net in then:
        same = [one for one in left if one.name == net.name and one.mode in (None, net.control_mode)]
        control = next(iter(sorted(same, key=lambda one: one.mode is None)), None)
        if control is None:
            known = net.controlnet_conditioning_scale
            its_scale = "" if known is None else f" (its scale was {known:g})"
            name = net.name if net.control_mode is None else f"{net.name}:{net.control_mode}"
            raise click.UsageError(
                f"{like} was drawn with the ControlNet {name}: give its control image with"
                f" --control {name}=FILE{its_scale}."
            )
        left.remove(control)
        scale = net.controlnet_conditioning_scale if control.scale is None else control.scale
        nets.append(replace(net, image=control.file, controlnet_conditioning_scale=scale))
    nets += [
        ControlNet(new.name, new.file, controlnet_conditioning_scale=new.scale, control_mode=new.mode) for new in left
    ]
    return nets


def name_as_given(violation: Violation, nets: Sequence[ControlNet]) -> Violation:
    """Return a violation in which the ControlNet is named as on the command line."""
    found = _PLACE.match(violation.field)
    if not found or int(found[1]) >= len(nets):
        return violation
    net, part = nets[int(found[1])], found[2]
    file = f"={net.image}" if isinstance(net.image, Path) else ""
    field = f"--control {net.name}{file}" if part == "image" else f"--control {net.name}, {part}"
    return Violation(field=field, description=violation.description)


def _colon_before_scale(rest: str) -> int:
    """Return the index of the colon in FILE:SCALE; the length without a scale. File names may contain colons."""
    at = rest.rfind(":")
    if at < 1 or Path(rest).exists():
        return len(rest)
    # If no such file exists, the text after the colon is a scale only if it is a number.
    return at if Path(rest[:at]).exists() or _number(rest[at + 1 :]) is not None else len(rest)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


_CONTROL = click.option(
    "--control",
    "controlnets",
    type=ControlType(),
    multiple=True,
    metavar="NAME[:MODE]=FILE[:SCALE]",
    help="Steer the picture by this control image with the ControlNet NAME; repeatable. "
    "A union needs the MODE of the image, such as union:depth. bottega controlnets lists both.",
)

PART = GenerationPart(
    options=(
        _CONTROL,
        click.option(
            "--stale-residuals/--no-stale-residuals",
            default=None,
            help="Use residuals of the previous step instead of waiting for a server (approximate). "
            "Default: by --fidelity.",
        ),
    ),
    inputs=(_CONTROL,),
    stage="controlnets",
    describe=_describe,
    warn=_warn,
    merge=_merge,
    rename=_rename,
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
