"""`bottega loras`, and what LoRAs add to other commands: options, output lines and advice."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import click

from bottega import errors, rules
from bottega.addons.loras.client.cli_import import (
    add_command,
    discard_command,
    listed,
    quarantine_command,
    rebuild_command,
)
from bottega.addons.loras.client.sdk import LEAST_PROMPTS
from bottega.addons.loras.client.types import StoredLora
from bottega.client.cli.addons import GenerationPart, ask_as_operator
from bottega.client.cli.error_help import storage_advice
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option, with_examples
from bottega.client.cli.terminal import (
    PlainTable,
    escaped,
    fail,
    moment_text,
    note,
    print_facts,
    print_table,
    say,
    short_hash,
    size_text,
)
from bottega.client.sdk.clients import Client
from bottega.client.types.fleet import Readiness
from bottega.client.types.inputs import Lora
from bottega.client.types.provenance import Provenance
from bottega.errors import BottegaError
from bottega.miniature import MODELS

# LoRAs of GiB take some seconds; after that the command tells what is so by then.
_LOAD_S, _POLL_S = 15.0, 0.05


@click.group("loras", cls=ListGroup)
@with_examples("""
    bottega loras                      lists them, and the models they fit
    bottega loras add outline FILE     uploads a LoRA or an embedding
    bottega loras show outline         shows all about one
    bottega loras pin outline          keeps it in the store's memory
    bottega loras profile outline      measures how late it may arrive
    bottega loras quarantine           lists files that are in no catalogue
    bottega loras rebuild              restores them; `discard` deletes them
    bottega generate "a red star" --lora outline:0.8
""")
def command() -> None:
    """List, add, measure and remove LoRAs and embeddings."""


@command.command("list")
@address_option
@fleet_option
def list_command(*, address: str) -> None:
    """List the LoRAs that you may use.

    Operators see all LoRAs; tenants see those that they may use.
    """
    with connect(address) as client:
        listed = ask_as_operator(client, "lora", lambda: (client.loras(), client.loras_in_quarantine()))
    if listed is None:
        return
    loras, quarantined = listed
    if quarantined:
        note(f"{quarantined} more are in quarantine: bottega loras quarantine lists them.")
    if not loras:
        note("There are no LoRAs yet: bottega loras add NAME FILE.")
        return
    columns = ("lora", "base", "kind", ">rank", ">size", "pinned", "trigger words")
    table = PlainTable(*columns, optional=("pinned", "rank", "kind"))
    for lora in loras:
        facts = (str(lora.rank or ""), size_text(lora.size_bytes), "yes" if lora.pinned else "")
        kind = f"{lora.kind}, in part" if lora.ignored else lora.kind
        table.add_row(lora.name, lora.base, kind, *facts, ", ".join(lora.trigger_words))
    print_table(table)


@command.command("show")
@click.argument("name")
@address_option
@fleet_option
def show(*, name: str, address: str) -> None:
    """Show all about the LoRA NAME."""
    with connect(address) as client:
        lora = client.lora(name)
    print_facts(_facts(lora))


command.add_command(add_command)


@command.command("remove")
@click.argument("name")
@address_option
@fleet_option
def remove(*, name: str, address: str) -> None:
    """Delete the LoRA NAME.

    A LoRA that the store's configuration lists is back when the store starts again. With `bottega up` these are the
    model's own.
    """
    with connect(address) as client:
        client.remove_lora(name)
    say(f"{name} is removed")


@command.command("pin")
@click.argument("name")
@address_option
@fleet_option
def pin(*, name: str, address: str) -> None:
    """Keep the LoRA NAME in its store's memory."""
    with connect(address) as client:
        pinned = client.pin_lora(name)
        lora = _wait_until_loaded(client, pinned)
    if lora.readiness is Readiness.LOADED:
        say(f"{name} is pinned, and takes {size_text(lora.size_bytes)} of its store's memory")
    elif lora.readiness is Readiness.LOADING:
        say(f"{name} is pinned, and its store is still loading it")
    elif pinned.readiness is Readiness.LOADING:
        fail(f"{name} is pinned, but its store could not load it", "bottega logs loras -n 50 says why.")
    else:
        say(f"{name} is pinned, and will be loaded when LoRAs that are in use now leave room for it")


@command.command("unpin")
@click.argument("name")
@address_option
@fleet_option
def unpin(*, name: str, address: str) -> None:
    """Allow the LoRA NAME to be evicted from its store's memory."""
    with connect(address) as client:
        client.pin_lora(name, pinned=False)
    say(f"{name} is not pinned any more")


for each in (quarantine_command, rebuild_command, discard_command):
    command.add_command(each)


def _wait_until_loaded(client: Client, lora: StoredLora) -> StoredLora:
    """Wait some seconds until the store has loaded a LoRA, and return the LoRA's newest description."""
    deadline = time.monotonic() + _LOAD_S
    while lora.readiness is Readiness.LOADING and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        lora = client.lora(lora.name)
    return lora


def _facts(lora: StoredLora) -> list[tuple[str, str]]:
    bounds = ", ".join(f"step {bound.max_step} of {bound.num_inference_steps}" for bound in lora.bounds)
    own = [
        ("rank", str(lora.rank or "none (whole differences)")),
        ("modules", str(lora.modules)),
        *([("ignored layers", listed(lora.ignored))] if lora.ignored else []),
        ("size", size_text(lora.size_bytes)),
        *([("text encoders' part", size_text(lora.text_bytes))] if lora.text_bytes else []),
        ("format", lora.format),
        ("trigger words", ", ".join(lora.trigger_words) or "none"),
        ("may be late until", bounds or "a fifth of the steps (not measured)"),
    ]
    embedding = [("token", lora.token), ("vectors", str(lora.modules)), ("size", size_text(lora.size_bytes))]
    return [
        ("name", lora.name),
        ("base", lora.base),
        ("kind", lora.kind),
        *(embedding if lora.token else own),
        ("in the store's memory", _memory_state(lora)),
        ("added", moment_text(lora.added)),
        ("hash", short_hash(lora.digest)),
    ]


def _memory_state(lora: StoredLora) -> str:
    state = {Readiness.LOADING: "loading", Readiness.LOADED: "yes"}.get(lora.readiness, "no")
    return f"{state} (pinned)" if lora.pinned else state


@command.command("profile")
@click.argument("name")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="Prompt to draw; repeat it at least four times. The embedded model needs none.",
)
@click.option(
    "--steps",
    multiple=True,
    type=click.IntRange(1, 200),
    help="Steps of each picture; repeatable. Default: the model's. Other numbers of steps use the nearest one.",
)
@click.option(
    "--scale", type=float, default=1.0, show_default=True, help="Scale of the LoRA, ideally the strongest that you use."
)
@click.option("--model", help="Model to measure with; default: the one that NAME was made for.")
@address_option
@fleet_option
def profile(
    *, name: str, prompts: tuple[str, ...], steps: tuple[int, ...], scale: float, model: str | None, address: str
) -> None:
    """Measure how late the LoRA NAME may be loaded.

    Two pictures of every prompt are drawn, each with and without NAME. Give prompts of the kind that you use it with,
    including its trigger words. The store keeps the first step after which the latents of any picture differ (a cosine
    below .99). Requests that allow approximations need not wait for NAME: they make at most so many steps without it.
    """
    with connect(address) as client:
        drawn = prompts or _captions(client, client.lora(name))
        counts: tuple[int | None, ...] = tuple(dict.fromkeys(steps)) or (None,)
        for count in counts:
            note(f"drawing {len(drawn)} prompts with two seeds, with {name} and without ...")
            measured = client.profile_lora(
                name,
                drawn,
                scale=scale,
                num_inference_steps=count,
                model=model,
                on_prompt=lambda step: note(f"  step {step}"),
            )
            say(f"{name} may be late until step {measured.max_step} of {measured.num_inference_steps}")
            if not measured.max_step:
                note("It changes the picture from the first step on, so requests wait until it is loaded.")


def _captions(client: Client, lora: StoredLora) -> tuple[str, ...]:
    """Return prompts for a LoRA of an embedded model. Raise UsageError for other models."""
    from bottega.miniature.scenes import caption, held_out_scenes

    if lora.base not in MODELS or lora.base not in {model.name for model in client.models()}:
        raise click.UsageError(f"give at least {LEAST_PROMPTS} prompts: bottega loras profile {lora.name} --prompt ...")
    words = "".join(f", {word}" for word in lora.trigger_words)
    return tuple(caption(scene) + words for scene in held_out_scenes(LEAST_PROMPTS, things=1))


class LoraType(click.ParamType[Lora]):
    """A Click type for a LoRA, given as NAME[:SCALE]."""

    name = "lora"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Lora:
        name, colon, scale = value.partition(":")
        if not rules.is_adapter_name(name):
            self.fail(f"{name!r} is no name of a LoRA; give NAME or NAME:SCALE, such as outline:0.8", param, ctx)
        if not colon:
            return Lora(name)
        try:
            number = float(scale)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{name}: {scale!r} is no scale; give a number such as 0.8 after NAME:", param, ctx)
        return Lora(name, number)


def _describe(provenance: Provenance) -> Iterator[str]:
    for use in provenance.loras:
        if use.token:
            yield f"embedding {use.name}: its token is {use.token}, loaded after {use.load_s:.3f} s"
            continue
        yield f"LoRA {use.name}: scale {use.scale:g}, used from step {use.from_step}, loaded after {use.load_s:.3f} s"
        if use.mixed_alphas:
            yield f"LoRA {use.name}: its modules have different alphas, which stock Diffusers may ignore"
        if use.ignored_layers:
            yield f"LoRA {use.name}: {use.ignored_layers} layers of its file match nothing in the model and are ignored"
        if use.stock_may_leave_out:
            yield f"LoRA {use.name}: stock Diffusers may leave out its {', '.join(use.stock_may_leave_out)}"


PART = GenerationPart(
    options=(
        click.option(
            "--lora",
            "lora",
            type=LoraType(),
            multiple=True,
            metavar="NAME[:SCALE]",
            help="Draw with the LoRA or embedding NAME; repeatable. bottega loras lists them.",
        ),
        click.option(
            "--late-loras/--no-late-loras",
            "bounded_lora_loading",
            default=None,
            help="Start to denoise before the LoRAs are loaded (approximate). Default: by --fidelity.",
        ),
    ),
    stage="loras",
    describe=_describe,
    approximations=("bounded_lora_loading",),
)


_BY_CLASS = {
    errors.LoraNotFound: "bottega loras lists what there is.",
    errors.LoraUnusable: "bottega loras lists the model that each is for; bottega models what is served.",
    errors.NoLora: "bottega fleet shows whether a LoRA store has joined; bottega logs loras why one has not.",
}


def advice_for(error: BottegaError) -> str | None:
    """Return advice about an error of LoRAs or their stores; None for other errors."""
    if error.metadata.get("service") == "loras" and (advice := _of_the_store(error)) is not None:
        return advice
    if names := error.metadata.get("loras"):  # separated by commas; a single one if it is damaged
        if isinstance(error, errors.DataLoss):
            return f"Replace it by adding it again: bottega loras add {escaped(names)} FILE"
        if isinstance(error, errors.NotFinite):
            return "Try smaller scales (--lora NAME:SCALE), only one of the LoRAs, or none."
    return _BY_CLASS.get(type(error))


def _of_the_store(error: BottegaError) -> str | None:
    """Return advice about an error of a store itself, where advice about the gateway would not help."""
    match error:
        case errors.StorageUnavailable():
            return storage_advice(error, "LoRA store")
        case errors.DataLoss():
            return "bottega logs loras -n 50 says what is damaged."
        case errors.TooLarge():
            return ""
    return None
