"""`bottega controlnets` and the options, output lines and advice that ControlNets add to other commands."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from bottega import errors, rules
from bottega.client.addons.controlnets.types import AddedControlNet, MeasuredProfile, ProfileCase, ServedControlNet
from bottega.client.cli.addons import GenerationPart, ask_as_operator
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say, short_hash, size_text
from bottega.client.sdk.clients import Client
from bottega.client.types.control import ControlNet
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import ControlNetUse, Provenance
from bottega.errors import BottegaError, Violation
from bottega.planning import LEAST_SIMILARITY

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


_MINIATURE = "miniature"
# Of the embedded model's own scenes; measured, four differ in the fourth decimal.
_SCENES = 4


@command.command("profile")
@click.argument("name")
@click.argument("images", nargs=-1, metavar="[IMAGE]...", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt", default="", help="What is drawn with each IMAGE; default: nothing in particular.")
@click.option("--steps", type=click.IntRange(2, 200), help="Of each picture; default: the model's. Take your fewest.")
@click.option("--model", help="To measure with; default: the only one that is served.")
@address_option
@fleet_option
def profile(
    *, name: str, images: Sequence[Path], prompt: str, steps: int | None, model: str | None, address: str
) -> None:
    """Measure how similar the residuals of the ControlNet NAME are from step to step.

    Draws a picture with each control IMAGE; a handful of the kind that you use is enough. The embedded model's own
    ControlNets need none. The servers that host NAME remember the worst picture's cosine. From .99 on, requests that
    allow approximations go on with the residuals of the step before, where they would wait for their own.
    """
    with connect(address) as client:
        cases = [ProfileCase(prompt=prompt, image=image) for image in images] or [*_scenes(client, name, model)]
        note(f"drawing {len(cases)} pictures ...")
        measured = client.profile_controlnet(
            name, cases, num_inference_steps=steps, model=model, on_picture=lambda found: note(f"  {found:.4f}")
        )
    _report(name, measured)


def _scenes(client: Client, name: str, model: str | None) -> Iterator[ProfileCase]:
    """Of the embedded model, for its own ControlNets."""
    import random

    from bottega.miniature.scenes import DRAWN, caption, held_out_scenes, random_layout

    served = [one.name for one in client.models() if model in (None, one.name)]
    if served != [_MINIATURE] or name not in DRAWN:
        raise click.UsageError(
            f"give control images such as {name} is used with: bottega controlnets profile {name} IMAGE..."
        )
    rng = random.Random(0)
    for scene in held_out_scenes(_SCENES, things=1):
        yield ProfileCase(prompt=caption(scene), image=DRAWN[name](random_layout(scene, rng)))


def _report(name: str, measured: MeasuredProfile) -> None:
    profile, servers = measured.profile, ", ".join(measured.servers)
    steps = profile.num_inference_steps
    say(f"{name}: {profile.similarity:.4f} from step to step, of {steps}; {servers} will remember it")
    if profile.similarity >= LEAST_SIMILARITY:
        note(f"Requests of {steps} steps and more that allow approximations (no seed, or --fidelity balanced) may use")
        note("residuals one step old, where they would have to wait for them. Their provenance says when they did.")
    else:
        note(f"Below {LEAST_SIMILARITY:g}: every step still waits for its own residuals.")


_SHORTEST_S = 0.0005


def _merge(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    if nets := merged(options.pop("controlnets", None) or (), given.pop("controlnets"), like):
        options["controlnets"] = nets


def _rename(violation: Violation, options: GenerationOptions) -> Violation:
    return name_as_given(violation, options.get("controlnets") or ())


def _describe(provenance: Provenance) -> Iterator[str]:
    """Which ControlNets took part, where they ran, and what was waited for."""
    for use in provenance.controlnets:
        yield f"control {use.name}: {', '.join(_use_facts(use, provenance.worker))}"
    if provenance.controlnets and provenance.encoder_s >= _SHORTEST_S:
        yield f"ControlNets ran beside {provenance.encoder_s:.3f} s of the model's encoder"


def _warn(provenance: Provenance) -> Iterator[str]:
    """Say what of a control image was not looked at, and what had to be done with it first."""
    for use in provenance.controlnets:
        whose = f"the image of control {use.name}"
        if use.transparency_unread:
            yield f"{whose} is transparent in parts, and the colours there were taken as if they were opaque"
        if use.scaled_from_16_bits:
            yield f"{whose} has 16 bits of grey, which were scaled to 8 (Diffusers makes nearly all such levels white)"


def _use_facts(use: ControlNetUse, worker: str) -> Iterator[str]:
    servers = ["the worker itself" if server == worker else server for server in use.servers]
    if servers:
        yield f"by {', then '.join(servers)}"
    yield f"scale {use.scale:g}"
    yield f"waited {use.waited_s:.3f} s for it"
    if use.stale_steps:
        yield f"{use.stale_steps} steps with residuals one step old (approximate)"
    if use.end_step and use.begin_step == use.end_step:
        yield "active in no step"


# As the gateway names fields of a request's ControlNets.
_PLACE = re.compile(r"(?:spec\.)?controlnets\[(\d+)\]\.(\w+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlArgument:
    """One --control. scale: None where none was given."""

    name: str
    file: Path
    scale: float | None


class ControlType(click.ParamType[ControlArgument]):
    """Says what is wrong before anything is asked for."""

    name = "control"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> ControlArgument:
        name, given, rest = value.partition("=")
        if not given or not rest:
            self.fail(f"{value!r}: NAME=FILE or NAME=FILE:SCALE is wanted, such as edges=edges.png:0.8", param, ctx)
        if not rules.is_adapter_name(name):
            self.fail(
                f"{name!r} is no name of a ControlNet: letters, digits and . _ / + - are; bottega controlnets has them",
                param,
                ctx,
            )
        colon = _colon_before_scale(rest)
        file, scale = Path(rest[:colon]), rest[colon + 1 :]
        if not file.exists():
            self.fail(f"{name}: there is no file {file}", param, ctx)
        if file.is_dir():
            self.fail(f"{name}: {file} is a folder; a control image is wanted", param, ctx)
        number = _number(scale)
        if colon < len(rest) and number is None:
            self.fail(f"{name}: {scale!r} is no scale; a number such as 0.8 is wanted after FILE:", param, ctx)
        return ControlArgument(name=name, file=file, scale=number)


def merged(then: Sequence[ControlNet], given: Sequence[ControlArgument], like: Path | None) -> list[ControlNet]:
    """The ControlNets of a picture that was drawn before, each with the control image given now; then the others.

    Raises click.UsageError for one whose image is not given: pictures do not carry them.
    """
    left = list(given)
    nets = []
    for net in then:
        control = next((one for one in left if one.name == net.name), None)
        if control is None:
            known = net.controlnet_conditioning_scale
            was = "" if known is None else f" (its scale was {known:g})"
            raise click.UsageError(
                f"{like} was drawn with the ControlNet {net.name}: give its control image by"
                f" --control {net.name}=FILE{was}."
            )
        left.remove(control)
        scale = net.controlnet_conditioning_scale if control.scale is None else control.scale
        nets.append(replace(net, image=control.file, controlnet_conditioning_scale=scale))
    nets += [ControlNet(new.name, new.file, controlnet_conditioning_scale=new.scale) for new in left]
    return nets


def name_as_given(violation: Violation, nets: Sequence[ControlNet]) -> Violation:
    """What is wrong with a request, its ControlNet named as on the command line."""
    found = _PLACE.match(violation.field)
    if not found or int(found[1]) >= len(nets):
        return violation
    net, part = nets[int(found[1])], found[2]
    file = f"={net.image}" if isinstance(net.image, Path) else ""
    field = f"--control {net.name}{file}" if part == "image" else f"--control {net.name}, {part}"
    return Violation(field=field, description=violation.description)


def _colon_before_scale(rest: str) -> int:
    """Where in FILE:SCALE the colon is; the length where there is no scale. A file may have colons in its name."""
    at = rest.rfind(":")
    if at < 1 or Path(rest).exists():
        return len(rest)
    # What stands behind a colon is part of a name that is not there, unless it can be meant as a number.
    return at if Path(rest[:at]).exists() or _number(rest[at + 1 :]) is not None else len(rest)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


PART = GenerationPart(
    options=(
        click.option(
            "--control",
            "controlnets",
            type=ControlType(),
            multiple=True,
            metavar="NAME=FILE[:SCALE]",
            help="Follow this control image by the ControlNet NAME (bottega controlnets lists them); may be repeated.",
        ),
        click.option(
            "--stale-residuals/--no-stale-residuals",
            default=None,
            help="Go on with ControlNets' residuals of the step before (approximate). Default: by --fidelity.",
        ),
    ),
    stage="controlnets",
    describe=_describe,
    warn=_warn,
    merge=_merge,
    rename=_rename,
)


_BY_CLASS = {
    errors.ControlNetNotFound: "bottega controlnets lists what is served.",
    errors.ControlNetUnusable: "bottega controlnets lists which model each is for; bottega models what is served.",
    errors.ControlNetExists: "Add it under another name; bottega controlnets lists those that are taken.",
    errors.NoControlNet: "bottega controlnets says who hosts what; bottega logs why a server is not there.",
}
_BY_LIMIT = {
    "budget_bytes": "Ask for fewer ControlNets at once, or raise engine.budget_bytes of the servers that host them.",
    "controlnets": "Host it on another ControlNet server.",
}


def advice_for(error: BottegaError) -> str | None:
    """None where the error is about no ControlNet."""
    if isinstance(error, errors.TooLarge):
        return _BY_LIMIT.get(error.metadata.get("limit", ""))
    if isinstance(error, errors.NotFinite) and error.metadata.get("controlnets"):
        return "Try scales nearer to 0 (--control NAME=IMAGE:SCALE), or each ControlNet by itself, or none of them."
    return _BY_CLASS.get(type(error))
