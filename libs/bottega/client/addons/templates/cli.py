"""`bottega templates` and the output lines and advice that recorded edits add to other commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from bottega import errors, kinds
from bottega.client.addons.templates.cli_profile import command as profile_command
from bottega.client.addons.templates.client import DroppedTemplates, WarmedTemplates
from bottega.client.addons.templates.overview import FleetTemplate, TemplateHolder, TemplateOverview
from bottega.client.cli.addons import GenerationPart
from bottega.client.cli.error_help import storage_advice
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option
from bottega.client.cli.terminal import (
    PlainTable,
    confirm,
    fail,
    note,
    print_table,
    say,
    share_text,
    short_hash,
    size_text,
)
from bottega.client.sdk.clients import Client
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import Provenance
from bottega.errors import BottegaError
from bottega.v1.activations_pb2 import Template

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


command.add_command(profile_command)


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


_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86_400.0
# Of a template, whose names fit beside its other facts.
_MOST_NAMES = 2
# What a template was drawn with is read from the disk when an edit asks: next to nothing beside its activations.
_WHOLE = 0.99
_TITLES = {kinds.ACTIVATIONS: "store", kinds.WORKER: "worker"}

_NOTHING_YET = (
    "Nothing is recorded yet: the first edit of an image is, unless it is exact (--fidelity balanced, --masked-blocks)."
)
_NOTHING_EVER = "No worker records anything: activations_mib, of the engine in its configuration, is 0."
_NO_STORE = (
    "No activation store has joined: each worker has its own templates, which go with it "
    "(bottega logs activations says why one has not)."
)


@command.command("list")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="How many at most.")
@address_option
@fleet_option
def list_command(*, limit: int, address: str) -> None:
    """List templates, the one used last first, where each is, and how full stores and workers are.

    A template is in an activation store, in its memory (or so much of it) or on its disk alone, and in the memories of
    the workers that are named, which have used it of late. Edits under way need one that is in use. Of one with
    "75 % of the image" edits can take that much; those that need more compute and add it.
    Uses of a store's template are workers' questions: an edit for which its worker has all at hand asks nothing.
    """
    with connect(address) as client:
        overview = client.templates()
    if overview.templates:
        _show_by_model(overview.templates[:limit])
        if (more := len(overview.templates) - limit) > 0:
            say(f"{more} more, used longer ago: --limit NUMBER")
    else:
        note(_NOTHING_YET if _records(overview) else _NOTHING_EVER)
    if overview.holders:
        print_table(holders_table(overview.holders))
    _tell_trouble(overview)


def _show_by_model(templates: Sequence[FleetTemplate]) -> None:
    models = list(dict.fromkeys(known.record.model for known in templates))
    for model in models:
        if len(models) > 1:
            say(f"{model}:")
        print_table(templates_table([known for known in templates if known.record.model == model]))


def templates_table(templates: Sequence[FleetTemplate]) -> PlainTable:
    """Of one model; a line fits into 80 letters."""
    table = PlainTable("template", "pixels", ">steps", ">size", ">uses", ">used", "where", optional=("used", "pixels"))
    for known in templates:
        record = known.record
        table.add_row(
            short_hash(record.id),
            f"{record.width}x{record.height}",
            str(record.steps),
            size_text(record.size_bytes),
            str(record.uses),
            _ago(record.idle_s),
            "; ".join([", ".join(_places(known)), *_states(record)]),
        )
    return table


def holders_table(holders: Sequence[TemplateHolder]) -> PlainTable:
    """How full each is."""
    on_disk = any(each.kind == kinds.ACTIVATIONS for each in holders)
    table = PlainTable("kept by", ">templates", "in memory", *(["on disk"] if on_disk else []))
    for each in holders:
        table.add_row(
            f"{_TITLES.get(each.kind, each.kind)} {each.name}",
            str(each.templates),
            _room(each.memory_bytes, each.memory_budget_bytes),
            *([_room(each.disk_bytes, each.disk_budget_bytes) if each.kind == kinds.ACTIVATIONS else ""] * on_disk),
        )
    return table


def _tell_trouble(overview: TemplateOverview) -> None:
    for each in overview.holders:
        if each.trouble:
            note(f"The store {each.name} records nothing now: {each.trouble}. Edits are drawn meanwhile.")
    for silent in overview.silent:
        title = _TITLES.get(silent.kind, silent.kind)
        note(f"What the {title} {silent.name} has is not among these: {silent.error.message}")
    if not overview.has_store:
        note(_NO_STORE)


def _records(overview: TemplateOverview) -> bool:
    """Whether some worker keeps anything, as far as they answer."""
    workers = [each for each in overview.holders if each.kind == kinds.WORKER]
    return not workers or any(each.memory_budget_bytes for each in workers)


def _places(known: FleetTemplate) -> Iterator[str]:
    """Its store's memory or disk, and the workers."""
    record = known.record
    if known.store:
        in_memory = record.memory_bytes / record.size_bytes if record.size_bytes else 1.0
        yield "memory" if in_memory >= _WHOLE else f"memory {_share(in_memory)}" if in_memory else "disk"
    if len(known.workers) > _MOST_NAMES:
        yield f"{len(known.workers)} workers"
    else:
        yield from known.workers


def _states(record: Template) -> Iterator[str]:
    """What somebody who waits for it, or wants to drop it, has to know."""
    if record.pinned:
        yield "pinned"
    if record.in_use:
        yield "in use"
    if record.recording:
        yield "recording"
    elif 0 < record.valid_share < 1:
        yield f"{_share(record.valid_share)} of the image"


def _share(share: float) -> str:
    """In whole percents, but neither none nor all of what is a part."""
    return f"{min(99, max(1, round(share * 100)))} %"


def _room(used_bytes: int, budget_bytes: int) -> str:
    used = size_text(used_bytes) if used_bytes else "0"
    return f"{used} of {size_text(budget_bytes)}" if budget_bytes else "nothing"


def _ago(seconds: float) -> str:
    if seconds >= _DAY_S:
        return f"{seconds / _DAY_S:.0f} d"
    if seconds >= _HOUR_S:
        return f"{seconds / _HOUR_S:.0f} h"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds >= _MINUTE_S else f"{seconds:.0f} s"


def _merge(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    """Drop what an earlier edit took from others, or that it took nothing, where the command says anew what it may."""
    if given.get("masked_blocks") is not None or given.get("fidelity") is not None:
        options.pop("recording", None)
        options.pop("masked_blocks", None)


def _describe(provenance: Provenance) -> Iterator[str]:
    use = provenance.mask
    if provenance.blocks_reused:
        blocks = share_text(provenance.blocks_reused / max(provenance.blocks_total, provenance.blocks_reused))
        where = f"recording {short_hash(use.recording)}" if use.recording else "what was recorded"
        yield f"masked blocks: {blocks} of all blocks took what is not masked from {where} (approximate)"
        yield f"masked blocks: {share_text(use.computed_share)} of the tokens computed in them"
    elif use.computed_all_because:
        yield f"all was computed: {use.computed_all_because}"
    if use.recording and not provenance.blocks_reused and not use.kept_latents:
        yield f"outside the mask the noise is that of recording {short_hash(use.recording)} (approximate)"
    if use.kept_latents:
        yield "kept for editing: outside the mask the latents are those that drew the image"
    if use.recorded:
        yield "recorded: later edits of this image can compute the masked part alone"


PART = GenerationPart(options=(), stage=kinds.ACTIVATIONS, describe=_describe, merge=_merge)


_NO_STORE_ADVICE = (
    "bottega fleet shows whether an activation store has joined; bottega logs activations why one has not.\n"
    "Edits are drawn meanwhile: workers use what is in their own memory, and compute the rest."
)
_NOT_KEPT = (
    "--no-masked-blocks computes all with the other parameters: another picture, which can be drawn again.\n"
    "Edits with --fidelity exact, or with --seed and no word of fidelity, can always be."
)
_NOBODY_IDLE = (
    "Try again when one is idle (bottega fleet), or name the worker that shall measure all the same: --worker NAME."
)


def advice_for(error: BottegaError) -> str | None:
    """None where the error is about no store and no template."""
    if isinstance(error, errors.NoActivationStore):
        return _NO_STORE_ADVICE
    if isinstance(error, errors.RecordingNotKept):
        return _NOT_KEPT
    if error.metadata.get("service") != kinds.ACTIVATIONS:
        return None
    match error:
        case errors.NoWorker():
            return _NOBODY_IDLE
        case errors.StorageUnavailable():
            return storage_advice(error, "activation store")
        case errors.DataLoss():
            return "bottega logs activations -n 50 says what is damaged; edits compute what it cannot give."
    return None
