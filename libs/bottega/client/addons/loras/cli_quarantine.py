"""`bottega loras quarantine`, `rebuild` and `discard`: LoRA files that their store's catalogue does not list."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import click

from bottega.client.cli.options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, confirm, fail, note, print_table, say, size_text
from bottega.client.sdk.clients import Client
from bottega.errors import BottegaError, InvalidRequest, LoraExists
from bottega.v1.lora_pb2 import QuarantinedLora

# Of an id, in a list: enough to tell one from the others, and the least to choose it by.
_ID_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuarantinedAtStore:
    store: str
    lora: QuarantinedLora

    @property
    def label(self) -> str:
        """For people."""
        return self.lora.name or self.lora.id[:_ID_LETTERS]


@click.command("quarantine")
@address_option
@fleet_option
def quarantine_command(*, address: str) -> None:
    """List LoRAs whose files a store has, and its catalogue does not know.

    The store moves such files into quarantine when it starts, and deletes none. They count into its disk_bytes.
    """
    with connect(address) as client:
        stores = client.lora_quarantines()
    table = PlainTable("lora", "base", ">size", "since", "id", "store", wraps=("base",), optional=("size", "since"))
    for store in stores:
        for lora in store.loras:
            since = datetime.fromtimestamp(lora.since_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
            size = size_text(lora.size_bytes) if lora.HasField("size_bytes") else "weights are gone"
            known = (lora.name or "not known", lora.base or "not known")
            table.add_row(*known, size, since, lora.id[:_ID_LETTERS], store.store)
    if not any(store.loras for store in stores):
        note("Nothing is in quarantine.")
        return
    print_table(table)
    for store in stores:
        if store.loras:
            note(f"Store {store.store} has them in {store.folder} on its machine.")
    note("bottega loras rebuild brings them back, all or some; bottega loras discard deletes them for good.")


@click.command("rebuild")
@click.argument("which", nargs=-1)
@click.option("--name", help="New name; only with a single WHICH.")
@click.option(
    "--base",
    metavar="MODEL",
    help="The model that it was made for; default: the recorded one, or the only one that fits.",
)
@address_option
@fleet_option
def rebuild_command(*, which: tuple[str, ...], name: str | None, base: str | None, address: str) -> None:
    """Bring LoRAs back into their store's catalogue, from their files in quarantine.

    WHICH are names, or ids as `bottega loras quarantine` lists them; without any, all are brought back. Every file is
    read and checked first; one that is damaged stays where it is.
    """
    with connect(address) as client:
        found = _choose(client, which)
        if not found:
            note("Nothing is in quarantine: the catalogue knows every file.")
            return
        if name and len(found) > 1:
            raise click.UsageError(f"--name is for one LoRA, and these are {len(found)}")
        left = [each for each in found if not _restore(client, each, name=name or "", base=base or "")]
    if len(found) > 1 or left:
        back = len(found) - len(left)
        rest = "; the others stay in quarantine" if left else ""
        say(f"{back} of {len(found)} {'is' if back == 1 else 'are'} back{rest}")
    sys.exit(1 if left else 0)


@click.command("discard")
@click.argument("which", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Delete all that is in quarantine.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_option
@fleet_option
def discard_command(*, which: tuple[str, ...], everything: bool, yes: bool, address: str) -> None:
    """Delete LoRAs from quarantine, for good.

    WHICH are names, or ids as `bottega loras quarantine` lists them.
    """
    if bool(which) == everything:
        raise click.UsageError("say which, or --all")
    with connect(address) as client:
        found = _choose(client, which)
        if not found:
            note("Nothing is in quarantine.")
            return
        listed = ", ".join(each.label for each in found)
        if not yes:
            note(f"{len(found)} will be deleted for good: {listed}")
            confirm("Delete?")
        freed_bytes = sum(client.discard_lora(each.lora.id) for each in found)
    say(f"{len(found)} deleted, {size_text(freed_bytes)} free")


def _restore(client: Client, found: _QuarantinedAtStore, *, name: str, base: str) -> bool:
    """Whether it is back; says so, or why it is not."""
    try:
        answer = client.restore_lora(found.lora.id, name=name, base=base)
    except BottegaError as error:
        note(f"{found.label} is not back: {error.message}")
        if isinstance(error, InvalidRequest) and any(item.field == "base" for item in error.violations):
            note(f"  bottega loras rebuild {found.lora.id[:_ID_LETTERS]} --base MODEL")
        if isinstance(error, LoraExists):
            note(f"  bottega loras rebuild {found.lora.id[:_ID_LETTERS]} --name NAME gives it another one.")
        return False
    say(f"{answer.lora.name} is back for {answer.lora.base}")
    if answer.unknown:
        note(f"  not known from its files: {', '.join(answer.unknown)}")
    return True


def _choose(client: Client, which: Sequence[str]) -> list[_QuarantinedAtStore]:
    """Those that were asked for, each once; without any asked for, all. Ends the command where one is not there."""
    there = [
        _QuarantinedAtStore(store=store.store, lora=lora) for store in client.lora_quarantines() for lora in store.loras
    ]
    if not which:
        return there
    chosen: dict[str, _QuarantinedAtStore] = {}
    for text in dict.fromkeys(which):
        matching = [each for each in there if text in (each.lora.name, each.lora.id)]
        if not matching and len(text) >= _ID_LETTERS:
            matching = [each for each in there if each.lora.id.startswith(text)]
        if not matching:
            fail(f"nothing in quarantine is called {text}", "bottega loras quarantine lists what there is.")
        if len({each.lora.id for each in matching}) > 1:
            ids = ", ".join(each.lora.id for each in matching)
            fail(f"{text} may be any of {len(matching)}", f"Say which by its id: {ids}")
        chosen[matching[0].lora.id] = matching[0]
    return list(chosen.values())
