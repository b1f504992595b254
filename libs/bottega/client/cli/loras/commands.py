"""`bottega loras`: which LoRAs the suite has, and how to add, measure and remove them."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from bottega.client.cli.adapters import ask_as_operator
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.list_group import ListGroup
from bottega.client.cli.loras.profile import command as profile_command
from bottega.client.cli.loras.quarantine import discard_command, quarantine_command, rebuild_command
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say, short_hash, size_text
from bottega.client.sdk.clients import Client
from bottega.errors import InvalidRequest, LoraNotFound
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


for each in (profile_command, quarantine_command, rebuild_command, discard_command):
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
