"""`bottega loras` and the options, output lines and advice that LoRAs add to other commands."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click

from bottega import errors, rules
from bottega.client.addons.loras.cli_quarantine import discard_command, quarantine_command, rebuild_command
from bottega.client.addons.loras.client import LEAST_PROMPTS
from bottega.client.cli.addons import GenerationPart, ask_as_operator
from bottega.client.cli.error_help import storage_advice
from bottega.client.cli.escaping import escaped
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say, short_hash, size_text
from bottega.client.sdk.clients import Client
from bottega.client.types.lora import Lora
from bottega.client.types.provenance import Provenance
from bottega.errors import BottegaError, InvalidRequest, LoraNotFound
from bottega.v1.lora_pb2 import LORA_STATE_IN_MEMORY, LORA_STATE_LOADING, StoredLora

# LoRAs of GiB take some seconds; after that the command tells what is so by then.
_LOAD_S, _POLL_S = 15.0, 0.05


@click.group("loras", cls=ListGroup)
def command() -> None:
    """Look after LoRAs: list, show, add, remove, pin, unpin, profile, quarantine, rebuild, discard.

    \b
      bottega loras                                 those that the suite has, and for which base models
      bottega loras add outline outline.safetensors kohya's, Diffusers' or PEFT's; a folder of theirs as well
      bottega loras show outline                    all that is known of one
      bottega loras pin outline                     keeps it in the store's memory
      bottega loras profile outline                 measures how late it may come into a picture
      bottega loras quarantine                      files that the store's catalogue does not know
      bottega loras rebuild                         brings them back into it; `discard` deletes them
      bottega generate "a red star" --lora outline:0.8
    """


@command.command("list")
@address_option
@fleet_option
def list_command(*, address: str) -> None:
    """List the LoRAs that the suite has; for a tenant, those that it may use."""
    with connect(address) as client:
        listed = ask_as_operator(client, "lora", lambda: (client.loras(), client.loras_in_quarantine()))
    if listed is None:
        return
    loras, quarantined = listed
    if quarantined:
        note(f"{quarantined} more in quarantine, unknown to the catalogue: bottega loras quarantine lists them.")
    if not loras:
        note("There are no LoRAs yet: bottega loras add NAME FILE.")
        return
    table = PlainTable("lora", "base", ">rank", ">size", "pinned", "trigger words", optional=("pinned", "rank"))
    for lora in loras:
        facts = (str(lora.rank), size_text(lora.size_bytes), "yes" if lora.pinned else "")
        table.add_row(lora.name, lora.base, *facts, ", ".join(lora.trigger_words))
    print_table(table)


@command.command("show")
@click.argument("name")
@address_option
@fleet_option
def show(*, name: str, address: str) -> None:
    """Say all that is known of the LoRA NAME."""
    with connect(address) as client:
        lora = client.lora(name)
    table = PlainTable("", "")
    for label, text in _facts(lora):
        table.add_row(label, text)
    print_table(table)


@command.command("add")
@click.argument("name")
@click.argument("path")
@click.option("--base", metavar="MODEL", help="The model that it was made for; default: the store's only one.")
@click.option(
    "--trigger",
    "trigger_words",
    multiple=True,
    metavar="WORDS",
    help="Trigger word that calls up its style; repeatable.",
)
@address_option
@fleet_option
def add(*, name: str, path: str, base: str | None, trigger_words: tuple[str, ...], address: str) -> None:
    """Bring a LoRA, and call it NAME; NAME@TENANT is for that tenant alone, who calls it NAME.

    PATH is a .safetensors file or a folder of PEFT, also with one for each component, or of Diffusers, and is
    uploaded; what is not on this machine is looked for on the store's, below the root that its configuration allows.
    The same once more, with other trigger words, changes those.
    """
    # What cannot even be looked at, such as a name that is too long, is not here either.
    here = os.path.exists(path)  # noqa: PTH110 - Path.exists raises for it
    with connect(address) as client:
        before = _trigger_words(client, name) if trigger_words else None
        if here:
            lora = client.add_lora(name, Path(path), base=base, trigger_words=trigger_words)
        else:
            lora = _register_at_store(client, name, path, base=base, trigger_words=trigger_words)
    modules = f"{lora.modules} module{'s' if lora.modules > 1 else ''} of rank {lora.rank}"
    say(f"{lora.name} is there for {lora.base}: {modules}, {size_text(lora.size_bytes)}")
    if before is not None and before != list(lora.trigger_words):
        was = ", ".join(before) or "none"
        say(f"It was there already; its trigger words are now: {', '.join(lora.trigger_words)} (before: {was})")


@command.command("remove")
@click.argument("name")
@address_option
@fleet_option
def remove(*, name: str, address: str) -> None:
    """Forget the LoRA NAME.

    One that the store's configuration lists, as the model's own are with `bottega up`, is back at its next start.
    """
    with connect(address) as client:
        client.remove_lora(name)
    say(f"{name} is removed")


@command.command("pin")
@click.argument("name")
@address_option
@fleet_option
def pin(*, name: str, address: str) -> None:
    """Keep the LoRA NAME in its store's memory, whatever else is used."""
    with connect(address) as client:
        pinned = client.pin_lora(name)
        lora = _wait_until_loaded(client, pinned)
    if lora.state == LORA_STATE_IN_MEMORY:
        say(f"{name} is pinned: {size_text(lora.size_bytes)} of its store's memory are its own")
    elif lora.state == LORA_STATE_LOADING:
        say(f"{name} is pinned, and its store is still loading it")
    elif pinned.state == LORA_STATE_LOADING:
        fail(f"{name} is pinned, but its store could not load it", "bottega logs loras -n 50 says why.")
    else:
        say(f"{name} is pinned, and comes into its store's memory when others there, now in use, leave it room")


@command.command("unpin")
@click.argument("name")
@address_option
@fleet_option
def unpin(*, name: str, address: str) -> None:
    """Let the LoRA NAME go from its store's memory when others need the room."""
    with connect(address) as client:
        client.pin_lora(name, pinned=False)
    say(f"{name} is pinned no more")


for each in (quarantine_command, rebuild_command, discard_command):
    command.add_command(each)


def _wait_until_loaded(client: Client, lora: StoredLora) -> StoredLora:
    """The same, after its store has loaded it, where it does so in a while."""
    deadline = time.monotonic() + _LOAD_S
    while lora.state == LORA_STATE_LOADING and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        lora = client.lora(lora.name)
    return lora


def _trigger_words(client: Client, name: str) -> list[str] | None:
    """Trigger words of the LoRA that has that name; None where there is none."""
    try:
        return list(client.lora(name).trigger_words)
    except (LoraNotFound, InvalidRequest):  # what is wrong with the name is said where it is brought
        return None


def _register_at_store(
    client: Client, name: str, path: str, *, base: str | None, trigger_words: tuple[str, ...]
) -> StoredLora:
    """From the store's machine. Most often a path that is not here is a wrong one, so that is said first."""
    from bottega.client.cli.error_help import exit_status

    try:
        return client.register_lora(name, path, base=base, trigger_words=trigger_words)
    except InvalidRequest as error:
        rules = [item.description for item in error.violations if item.field == "path"]
        if not rules:
            raise
        said = f"Nor can the store take it from a path of its own machine: {'; '.join(rules)}"
        fail(f"there is no file or folder {path} on this machine", said, status=exit_status(error))


def _facts(lora: StoredLora) -> list[tuple[str, str]]:
    bounds = ", ".join(f"step {bound.max_step} of {bound.num_inference_steps}" for bound in lora.bounds)
    return [
        ("name", lora.name),
        ("base", lora.base),
        ("rank", str(lora.rank)),
        ("modules", str(lora.modules)),
        ("size", f"{size_text(lora.size_bytes)}, of them text encoders {size_text(lora.text_bytes)}"),
        ("format", lora.format),
        ("trigger words", ", ".join(lora.trigger_words) or "none"),
        ("may be late until", bounds or "not measured; a fifth of the steps"),
        ("in the store's memory", _memory_state(lora)),
        ("added", _moment(lora.added_s)),
        ("hash", short_hash(lora.digest)),
    ]


def _moment(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "at no time that there is"


def _memory_state(lora: StoredLora) -> str:
    here = {LORA_STATE_LOADING: "soon", LORA_STATE_IN_MEMORY: "yes"}.get(lora.state)
    if here is None:
        return "not now, and stays there once it is" if lora.pinned else "no"
    return f"{here}, and stays there" if lora.pinned else here


_MINIATURE = "miniature"


@command.command("profile")
@click.argument("name")
@click.option("--prompt", "prompts", multiple=True, help="What is drawn; at least four. The embedded model needs none.")
@click.option(
    "--steps",
    multiple=True,
    type=click.IntRange(1, 200),
    help="Of each picture; repeatable. Default: the model's. Other numbers go by the nearest one.",
)
@click.option("--scale", type=float, default=1.0, show_default=True, help="Take the strongest that you draw with.")
@click.option("--model", help="To measure with; default: the one that NAME was made for.")
@address_option
@fleet_option
def profile(
    *, name: str, prompts: tuple[str, ...], steps: tuple[int, ...], scale: float, model: str | None, address: str
) -> None:
    """Measure how late the LoRA NAME may come into a picture.

    Draws two pictures of every prompt, with NAME and without: give prompts of the kind that you use it with, its
    trigger words included. The store remembers the step after which the worst picture leads elsewhere (a cosine of the
    latents below .99). Requests that allow approximations begin at once and make so many steps without NAME, at most,
    where it is not at the worker yet.
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
            say(f"{name}: may be late until step {measured.max_step} of {measured.num_inference_steps}")
            if not measured.max_step:
                note("It changes the picture from the first step on, so every request waits until it is loaded.")


def _captions(client: Client, lora: StoredLora) -> tuple[str, ...]:
    """Of scenes of the embedded model, where the LoRA is for that one."""
    from bottega.miniature.scenes import caption, held_out_scenes

    if lora.base != _MINIATURE or _MINIATURE not in {model.name for model in client.models()}:
        raise click.UsageError(f"give at least {LEAST_PROMPTS} prompts: bottega loras profile {lora.name} --prompt ...")
    words = "".join(f", {word}" for word in lora.trigger_words)
    return tuple(caption(scene) + words for scene in held_out_scenes(LEAST_PROMPTS, things=1))


class LoraType(click.ParamType[Lora]):
    """Says what is wrong before anything is asked for."""

    name = "lora"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Lora:
        name, colon, scale = value.partition(":")
        if not rules.is_adapter_name(name):
            self.fail(f"{name!r} is no name of a LoRA; NAME or NAME:SCALE is wanted, such as outline:0.8", param, ctx)
        if not colon:
            return Lora(name)
        try:
            number = float(scale)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{name}: {scale!r} is no scale; a number such as 0.8 is wanted after NAME:", param, ctx)
        return Lora(name, number)


def _describe(provenance: Provenance) -> Iterator[str]:
    for use in provenance.loras:
        yield f"LoRA {use.name}: scale {use.scale:g}, in from step {use.from_step}, there after {use.load_s:.3f} s"
        if use.mixed_alphas:
            yield f"LoRA {use.name}: its modules have different alphas; stock Diffusers may load it otherwise"
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
            help="Draw with the LoRA NAME (bottega loras lists them); may be repeated.",
        ),
        click.option(
            "--late-loras/--no-late-loras",
            "bounded_lora_loading",
            default=None,
            help="Make steps before the LoRAs are there (approximate). Default: by --fidelity.",
        ),
    ),
    stage="loras",
    describe=_describe,
)


_BY_CLASS = {
    errors.LoraNotFound: "bottega loras lists those that there are.",
    errors.LoraUnusable: "bottega loras lists which model each is for; bottega models what is served.",
    errors.NoLora: "bottega fleet shows whether a LoRA store has joined; bottega logs loras why one has not.",
}


def advice_for(error: BottegaError) -> str | None:
    """None where the error is about no LoRA and no store."""
    if error.metadata.get("service") == "loras" and (advice := _of_the_store(error)) is not None:
        return advice
    if names := error.metadata.get("loras"):  # joined by commas; one where it is damaged
        if isinstance(error, errors.DataLoss):
            return f"Bring it again as it was, which replaces it: bottega loras add {escaped(names)} FILE"
        if isinstance(error, errors.NotFinite):
            return "Try scales nearer to 0 (--lora NAME:SCALE), or each LoRA by itself, or none of them."
    return _BY_CLASS.get(type(error))


def _of_the_store(error: BottegaError) -> str | None:
    """What helps with the same errors of the gateway does not help here."""
    match error:
        case errors.StorageUnavailable():
            return storage_advice(error, "LoRA store")
        case errors.DataLoss():
            return "bottega logs loras -n 50 says what is damaged."
        case errors.TooLarge():
            return ""
    return None
