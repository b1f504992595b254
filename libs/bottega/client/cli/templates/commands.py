"""`bottega templates`: which images are recorded for edits, and how to keep, bring, forget and measure what is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from bottega.client.addons.templates.client import DroppedTemplates, WarmedTemplates
from bottega.client.addons.templates.overview import FleetTemplate, TemplateOverview
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.list_group import ListGroup
from bottega.client.cli.templates.listing import command as list_command
from bottega.client.cli.templates.profile import command as profile_command
from bottega.client.cli.terminal import confirm, fail, note, say, size_text
from bottega.client.sdk.clients import Client

# Some GiB come from a disk in that time; after it the command tells what is still on its way.
_LOAD_S, _POLL_S = 15.0, 0.1
_LISTS = "bottega templates lists those that there are."


@click.group("templates", cls=ListGroup)
def command() -> None:
    """Look after templates, images whose edits were recorded: list, warm, pin, unpin, drop, profile.

    What the first edit of an image computes is kept, so that later ones compute the masked part alone: in the memories
    of workers, and for all of them in the activation store, in its memory and on its disk.

    \b
      bottega templates                  which images are recorded, where, and how much room that takes
      bottega templates pin 3f0a91c25e   keeps one, whatever else is used; unpin lets it go
      bottega templates warm 3f0a91c25e  brings it from the store's disk into its memory
      bottega templates drop 3f0a91c25e  forgets one; its next edit computes the whole picture, and records again
      bottega templates profile          measures which blocks of the model are worth their bytes
      bottega edit star.png --mask mask.png "a green star" --masked-blocks
    """


@command.command("drop")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All of them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_option
@fleet_option
def drop(*, ids: tuple[str, ...], every: bool, yes: bool, address: str) -> None:
    """Forget templates, in stores and in workers, each ID as `bottega templates` shows it."""
    _check_which(ids, every)
    with connect(address) as client:
        if every and not yes:
            note("every edit will compute the whole picture once more")
            confirm("Drop all templates?")
        dropped = {id: client.drop_templates(id) for id in ids or ("",)}
        there = client.templates()
    missing = [id for id, what in dropped.items() if not what.stored + what.copies]
    if missing != list(ids) or every:
        say(_dropped(list(dropped.values())))
    _tell_what_stayed(ids, missing, there)


@command.command("pin")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@address_option
@fleet_option
def pin(*, ids: tuple[str, ...], address: str) -> None:
    """Keep templates in their store, whatever else is used, each ID as `bottega templates` shows it.

    A pinned template stays on the store's disk until it is dropped. Workers' own memory has no pins.
    """
    number = _change(address, ids, lambda client, id: client.pin_templates(id))
    say(f"{_counted(number)} pinned")


@command.command("unpin")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@address_option
@fleet_option
def unpin(*, ids: tuple[str, ...], address: str) -> None:
    """Let templates go from their store when others need the room."""
    number = _change(address, ids, lambda client, id: client.pin_templates(id, pinned=False))
    say(f"{_counted(number)} pinned no more")


@command.command("warm")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All, those used last first, as far as there is room.")
@address_option
@fleet_option
def warm(*, ids: tuple[str, ...], every: bool, address: str) -> None:
    """Bring templates from their store's disk into its memory, before edits ask for them.

    Nobody has to: an edit has its template brought when it is one of the first of its queue, and when it begins. The
    command waits for what is on its way, a quarter of a minute at most.
    """
    _check_which(ids, every)
    warmed: list[WarmedTemplates] = []
    _change(address, ids or ("",), lambda client, id: _warm(client, id, warmed))
    number, loading = sum(each.templates for each in warmed), sum(each.loading_bytes for each in warmed)
    if loading:
        say(f"{_counted(number)} in memory or on the way there: {size_text(loading)} still to come")
    else:
        say(f"{_counted(number)} in memory")


for each in (list_command, profile_command):
    command.add_command(each)


def _check_which(ids: Sequence[str], every: bool) -> None:
    if bool(ids) == every:
        raise click.UsageError("say which: the ID of a template, or several, or --all.")


def _change(address: str, ids: Sequence[str], change: Callable[[Client, str], int]) -> int:
    """Does it for each of them, and says which of them no store has; how many templates that were."""
    with connect(address) as client:
        numbers = {id: change(client, id) for id in ids}
        missing = [id for id, number in numbers.items() if id and not number]
        there = client.templates() if missing else None
    if there is not None:
        _fail_unkept(missing, there)
    return sum(numbers.values())


def _warm(client: Client, id: str, warmed: list[WarmedTemplates]) -> int:
    """Waits a while until they are there; how many."""
    deadline = time.monotonic() + _LOAD_S
    now = client.warm_templates(id)
    while now.loading_bytes and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = client.warm_templates(id)
    warmed.append(now)
    return now.templates


def _dropped(dropped: Sequence[DroppedTemplates]) -> str:
    """Such as "2 templates dropped; 3 copies in workers"."""
    stored, copies = sum(what.stored for what in dropped), sum(what.copies for what in dropped)
    of_workers = f"{copies} cop{'y' if copies == 1 else 'ies'} in workers' memory"
    if not stored and copies:
        return f"{of_workers} dropped"
    return f"{_counted(stored)} dropped" + (f", and {of_workers}" if copies else "")


def _counted(number: int) -> str:
    return f"{number} template{'' if number == 1 else 's'}"


def _tell_what_stayed(ids: Sequence[str], missing: Sequence[str], there: TemplateOverview) -> None:
    """What edits under way use stays in their workers; what nobody has is an error of who asked for it."""
    stayed = [id for id in ids if _found(id, there)]
    if stayed:
        fail(
            f"{', '.join(stayed)} is used by an edit now, and stays in {_holders(stayed, there)}",
            "Try again when that has ended.",
        )
    if missing and ids:
        fail(f"nobody has the template {', '.join(missing)}", _LISTS)
    if not ids and there.templates:
        note(f"{_counted(len(there.templates))} used by edits now, or recorded meanwhile, stayed.")


def _fail_unkept(missing: Sequence[str], there: TemplateOverview) -> NoReturn:
    """Of pins and warming: nothing was done for these, as no store has them, or has room for them in its memory."""
    kept = [id for id in missing if any(known.store for known in _found(id, there))]
    if kept:
        fail(
            f"the memory of {_holders(kept, there, of_workers=False)} has no room for all of {', '.join(kept)}",
            "budget_bytes, in the configuration of the store, says how much there is; edits use it from the disk.",
        )
    elsewhere = [id for id in missing if _found(id, there)]
    if elsewhere:
        where = _holders(elsewhere, there)
        fail(
            f"{', '.join(elsewhere)} is in no store, only in {where}",
            "A store keeps what was recorded to its end, where it has room; bottega doctor says whether it has.",
        )
    fail(f"no store has the template {', '.join(missing)}", _LISTS)


def _found(id: str, there: TemplateOverview) -> list[FleetTemplate]:
    return [known for known in there.templates if known.record.id.startswith(id)]


def _holders(ids: Sequence[str], there: TemplateOverview, *, of_workers: bool = True) -> str:
    """Names of the services that have them. of_workers: or of stores alone."""
    found = [known for id in ids for known in _found(id, there)]
    names = {name for known in found for name in (known.store, *(known.workers if of_workers else ())) if name}
    return ", ".join(sorted(names))
