"""`bottega loras add`, and `quarantine`, `rebuild` and `discard` for LoRA files that their store's catalogue lacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bottega.addons.loras.client.types import LoraInQuarantine, StoredLora
from bottega.client.cli.options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, confirm, fail, moment_text, note, print_table, say, size_text
from bottega.client.sdk.clients import Client
from bottega.errors import BottegaError, InvalidRequest, LoraExists, LoraNotFound

# Digits of an ID in a list, and the fewest digits to choose it by.
_ID_LETTERS = 12
_SHOWN_LAYERS = 8


@click.command("add")
@click.argument("name")
@click.argument("path")
@click.option("--base", metavar="MODEL", help="Model that it was made for; default: the only one that the store knows.")
@click.option(
    "--trigger",
    "trigger_words",
    multiple=True,
    metavar="WORDS",
    help="Trigger words, which make the model use its style; repeatable.",
)
@click.option(
    "--allow-partial", is_flag=True, help="Ignore layers of the file that match nothing in the model; they are listed."
)
@address_option
@fleet_option
def add_command(
    *, name: str, path: str, base: str | None, trigger_words: tuple[str, ...], allow_partial: bool, address: str
) -> None:
    """Add a LoRA, or a textual inversion embedding, as NAME.

    A LoRA NAME@TENANT belongs to that tenant alone, which calls it NAME.

    PATH is a .safetensors file, or a folder of Diffusers or PEFT, which may have a subfolder for each component. The
    trigger word of an embedding is its token; without one it is that of its file, or NAME, in small letters. PATH is
    uploaded from this machine. If it is not here, the store looks for it on its own machine, below the root folder that
    its configuration allows. If the same LoRA exists, its trigger words are replaced.
    """
    here = os.path.exists(path)  # noqa: PTH110 - Path.exists raises for names that are too long
    with connect(address) as client:
        before = _trigger_words(client, name) if trigger_words else None
        if here:
            lora = client.add_lora(
                name, Path(path), base=base, trigger_words=trigger_words, allow_partial=allow_partial
            )
        else:
            lora = _register_at_store(
                client, name, path, base=base, trigger_words=trigger_words, allow_partial=allow_partial
            )
    if lora.token:
        count = f"{lora.modules} vector{'s' if lora.modules > 1 else ''}"
        say(f"{lora.name} is ready for {lora.base}: an embedding of {count}, which {lora.token} stands for in prompts")
        note(f'Draw with it: bottega generate "... {lora.token} ..." --lora {lora.name}')
        return
    rank = f" of rank {lora.rank}" if lora.rank else ""
    modules = f"{lora.modules} module{'s' if lora.modules > 1 else ''}{rank}"
    say(f"{lora.name} is ready for {lora.base}: {modules}, {size_text(lora.size_bytes)}")
    if lora.ignored:
        many = len(lora.ignored) > 1
        what = f"{len(lora.ignored)} layers of its file match" if many else "1 layer of its file matches"
        verb = "are" if many else "is"
        note(f"{what} nothing in the model and {verb} ignored: {listed(lora.ignored)}")
    elif lora.family:
        note(f"It is for {lora.family}: all layers of its file match the model, and none is ignored.")
    if lora.note:
        note(f"Attention: {lora.note}.")
    if before is not None and before != list(lora.trigger_words):
        earlier = ", ".join(before) or "none"
        say(f"It existed already; its trigger words are now: {', '.join(lora.trigger_words)} (before: {earlier})")


def listed(layers: Sequence[str]) -> str:
    """Return the names of some layers as text, with the number of the others."""
    more = f" and {len(layers) - _SHOWN_LAYERS} more" if len(layers) > _SHOWN_LAYERS else ""
    return ", ".join(layers[:_SHOWN_LAYERS]) + more


def _trigger_words(client: Client, name: str) -> list[str] | None:
    try:
        return list(client.lora(name).trigger_words)
    except (LoraNotFound, InvalidRequest):  # a wrong name is reported when it is added
        return None


def _register_at_store(
    client: Client, name: str, path: str, *, base: str | None, trigger_words: tuple[str, ...], allow_partial: bool
) -> StoredLora:
    """Make the store import a LoRA from its own machine. Errors also say that the path is missing on this machine."""
    from bottega.client.cli.error_help import exit_status

    try:
        return client.register_lora(name, path, base=base, trigger_words=trigger_words, allow_partial=allow_partial)
    except InvalidRequest as error:
        rules = [item.description for item in error.violations if item.field == "path"]
        if not rules:
            raise
        store = f"The store cannot import it from its own machine either: {'; '.join(rules)}"
        fail(f"there is no file or folder {path} on this machine", store, status=exit_status(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuarantinedAtStore:
    store: str
    lora: LoraInQuarantine

    @property
    def label(self) -> str:
        return self.lora.name or self.lora.id[:_ID_LETTERS]


@click.command("quarantine")
@address_option
@fleet_option
def quarantine_command(*, address: str) -> None:
    """List LoRA files that the store's catalogue does not contain.

    When a store starts, it moves such files into quarantine; it never deletes them. They count towards its disk_bytes.
    """
    with connect(address) as client:
        stores = client.lora_quarantines()
    table = PlainTable("lora", "base", ">size", "since", "id", "store", wraps=("base",), optional=("size", "since"))
    for store in stores:
        for lora in store.loras:
            size = size_text(lora.size_bytes) if lora.size_bytes is not None else "weights are gone"
            known = (lora.name or "not known", lora.base or "not known")
            table.add_row(*known, size, moment_text(lora.since), lora.id[:_ID_LETTERS], store.store)
    if not any(store.loras for store in stores):
        note("The quarantine is empty.")
        return
    print_table(table)
    for store in stores:
        if store.loras:
            note(f"The store {store.store} keeps them in {store.folder} on its machine.")
    note("bottega loras rebuild restores all or some of them; bottega loras discard deletes them for good.")


@click.command("rebuild")
@click.argument("which", nargs=-1)
@click.option("--name", help="New name; only for a single LoRA.")
@click.option(
    "--base",
    metavar="MODEL",
    help="Model that it was made for; default: the recorded one, or the only one that fits.",
)
@address_option
@fleet_option
def rebuild_command(*, which: tuple[str, ...], name: str | None, base: str | None, address: str) -> None:
    """Restore LoRAs from quarantine.

    WHICH are names or IDs, as `bottega loras quarantine` lists them; the default is all. Every file is read and checked
    first; damaged files stay in quarantine.
    """
    with connect(address) as client:
        found = _choose(client, which)
        if not found:
            note("The quarantine is empty: the catalogue knows every file.")
            return
        if name and len(found) > 1:
            raise click.UsageError(f"--name is for a single LoRA; these are {len(found)}")
        left = [lora for lora in found if not _restore(client, lora, name=name or "", base=base or "")]
    if len(found) > 1 or left:
        back = len(found) - len(left)
        rest = "; the others stay in quarantine" if left else ""
        say(f"{back} of {len(found)} restored{rest}")
    sys.exit(1 if left else 0)


@click.command("discard")
@click.argument("which", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Delete everything in quarantine.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@address_option
@fleet_option
def discard_command(*, which: tuple[str, ...], everything: bool, yes: bool, address: str) -> None:
    """Delete LoRAs from quarantine for good.

    WHICH are names or IDs, as `bottega loras quarantine` lists them.
    """
    if bool(which) == everything:
        raise click.UsageError("name LoRAs, or give --all")
    with connect(address) as client:
        found = _choose(client, which)
        if not found:
            note("The quarantine is empty.")
            return
        if not yes:
            confirm(f"Delete {len(found)} for good ({', '.join(lora.label for lora in found)})?")
        freed_bytes = sum(client.discard_lora(lora.lora.id) for lora in found)
    say(f"{len(found)} deleted, {size_text(freed_bytes)} free")


def _restore(client: Client, found: _QuarantinedAtStore, *, name: str, base: str) -> bool:
    """Restore one LoRA, print the outcome, and return whether it was restored."""
    try:
        answer = client.restore_lora(found.lora.id, name=name, base=base)
    except BottegaError as error:
        note(f"{found.label} was not restored: {error.message}")
        if isinstance(error, InvalidRequest) and any(item.field == "base" for item in error.violations):
            note(f"  bottega loras rebuild {found.lora.id[:_ID_LETTERS]} --base MODEL")
        if isinstance(error, LoraExists):
            note(f"  bottega loras rebuild {found.lora.id[:_ID_LETTERS]} --name NAME gives it another name.")
        return False
    say(f"{answer.lora.name} is restored for {answer.lora.base}")
    if answer.unknown:
        note(f"  its files do not contain: {', '.join(answer.unknown)}")
    return True


def _choose(client: Client, which: Sequence[str]) -> list[_QuarantinedAtStore]:
    """Return the LoRAs with these names or IDs; all if none are given. End the command if one is missing."""
    quarantined = [
        _QuarantinedAtStore(store=store.store, lora=lora) for store in client.lora_quarantines() for lora in store.loras
    ]
    if not which:
        return quarantined
    chosen: dict[str, _QuarantinedAtStore] = {}
    for text in dict.fromkeys(which):
        matching = [lora for lora in quarantined if text in (lora.lora.name, lora.lora.id)]
        if not matching and len(text) >= _ID_LETTERS:
            matching = [lora for lora in quarantined if lora.lora.id.startswith(text)]
        if not matching:
            fail(f"nothing in quarantine has the name or ID {text}", "bottega loras quarantine lists what there is.")
        if len({lora.lora.id for lora in matching}) > 1:
            ids = ", ".join(lora.lora.id for lora in matching)
            fail(f"{text} may be any of {len(matching)}", f"Give one of these IDs: {ids}")
        chosen[matching[0].lora.id] = matching[0]
    return list(chosen.values())
