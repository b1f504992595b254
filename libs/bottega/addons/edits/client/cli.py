"""`bottega templates`, and what edits add to other commands: output lines and advice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from bottega import errors, kinds
from bottega.addons.edits.client.cli_profile import command as profile_command
from bottega.addons.edits.client.types import (
    DroppedTemplates,
    FleetTemplate,
    TemplateHolder,
    TemplateOverview,
    WarmedTemplates,
)
from bottega.client.cli.addons import GenerationPart
from bottega.client.cli.error_help import storage_advice
from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option, with_examples
from bottega.client.cli.terminal import (
    PlainTable,
    confirm,
    duration_text,
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
from bottega.client.types.provenance import MaskUse, Provenance
from bottega.errors import BottegaError

# Seconds that `warm` waits: some GiB are loaded from a disk in that time.
_LOAD_S, _POLL_S = 15.0, 0.1
_LISTS = "bottega templates lists what there is."


@click.group("templates", cls=ListGroup)
@with_examples("""
    bottega templates                  lists recorded images and their sizes
    bottega templates pin 3f0a91c25e   keeps one; unpin lets it go
    bottega templates warm 3f0a91c25e  loads one from disk into memory
    bottega templates drop 3f0a91c25e  deletes one; the next edit records it
    bottega templates profile          measures which blocks are worth keeping
    bottega edit star.png --mask mask.png "a green star" --masked-blocks
""")
def command() -> None:
    """List, pin, load, drop and measure templates of edits.

    A template is what the first edit of an image recorded: the activations of the model. Later edits of the image reuse
    them, and compute only the masked part. Workers have templates in memory; the activation store keeps them for all
    workers, on disk and in memory.
    """


@command.command("drop")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Drop all templates.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@address_option
@fleet_option
def drop(*, ids: tuple[str, ...], every: bool, yes: bool, address: str) -> None:
    """Delete templates from stores and workers.

    `bottega templates` shows the IDs.
    """
    _check_which(ids, every)
    with connect(address) as client:
        if every and not yes:
            confirm("Drop all templates? The next edit of each image computes the whole picture again.")
        dropped = {id: client.drop_templates(id) for id in ids or ("",)}
        remaining = client.templates()
    missing = [id for id, counts in dropped.items() if not counts.stored + counts.copies]
    if missing != list(ids) or every:
        say(_dropped(list(dropped.values())))
    _report_remaining(ids, missing, remaining)


@command.command("pin")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@address_option
@fleet_option
def pin(*, ids: tuple[str, ...], address: str) -> None:
    """Keep templates in their store.

    A pinned template stays on the store's disk until it is dropped or unpinned. Pins do not affect the copies in
    workers' memory. `bottega templates` shows the IDs.
    """
    number = _change(address, ids, lambda client, id: client.pin_templates(id))
    say(f"{_counted(number)} pinned")


@command.command("unpin")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@address_option
@fleet_option
def unpin(*, ids: tuple[str, ...], address: str) -> None:
    """Allow templates to be evicted from their store."""
    number = _change(address, ids, lambda client, id: client.pin_templates(id, pinned=False))
    say(f"{_counted(number)} unpinned")


@command.command("warm")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Load all that fit, the most recently used first.")
@address_option
@fleet_option
def warm(*, ids: tuple[str, ...], every: bool, address: str) -> None:
    """Load templates from their store's disk into its memory.

    This is optional, because the template of an edit is loaded when the edit is near the front of the queue. The
    command waits at most 15 s.
    """
    _check_which(ids, every)
    warmed: list[WarmedTemplates] = []
    _change(address, ids or ("",), lambda client, id: _warm(client, id, warmed))
    number, loading_bytes = sum(w.templates for w in warmed), sum(w.loading_bytes for w in warmed)
    if loading_bytes:
        say(f"{_counted(number)} in memory or being loaded: {size_text(loading_bytes)} still to load")
    else:
        say(f"{_counted(number)} in memory")


command.add_command(profile_command)


def _check_which(ids: Sequence[str], every: bool) -> None:
    if bool(ids) == every:
        raise click.UsageError("name one or more IDs, or give --all.")


def _change(address: str, ids: Sequence[str], change: Callable[[Client, str], int]) -> int:
    """Apply a change to each ID, and return how many templates changed. End the command for an unknown ID."""
    with connect(address) as client:
        numbers = {id: change(client, id) for id in ids}
        missing = [id for id, number in numbers.items() if id and not number]
        overview = client.templates() if missing else None
    if overview is not None:
        _fail_unchanged(missing, overview)
    return sum(numbers.values())


def _warm(client: Client, id: str, warmed: list[WarmedTemplates]) -> int:
    """Load templates, wait some seconds, and return how many are in memory or being loaded."""
    deadline = time.monotonic() + _LOAD_S
    now = client.warm_templates(id)
    while now.loading_bytes and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = client.warm_templates(id)
    warmed.append(now)
    return now.templates


def _dropped(dropped: Sequence[DroppedTemplates]) -> str:
    """Return what was dropped as text, such as "2 templates dropped, and 3 copies in workers' memory"."""
    stored, copies = sum(counts.stored for counts in dropped), sum(counts.copies for counts in dropped)
    worker_copies = f"{copies} cop{'y' if copies == 1 else 'ies'} in workers' memory"
    if not stored and copies:
        return f"{worker_copies} dropped"
    return f"{_counted(stored)} dropped" + (f", and {worker_copies}" if copies else "")


def _counted(number: int) -> str:
    return f"{number} template{'' if number == 1 else 's'}"


def _report_remaining(ids: Sequence[str], missing: Sequence[str], remaining: TemplateOverview) -> None:
    """Report templates that could not be dropped because an edit uses them, and IDs that no service has."""
    in_use = [id for id in ids if remaining.matching(id)]
    if in_use:
        fail(
            f"an edit uses {', '.join(in_use)} now, so it was not dropped from {remaining.holders_of(in_use)}",
            "Try again when the edit has ended.",
        )
    if missing and ids:
        fail(f"no service has the template {', '.join(missing)}", _LISTS)
    if not ids and remaining.templates:
        note(f"{_counted(len(remaining.templates))} remain, because edits use or record them now.")


def _fail_unchanged(missing: Sequence[str], overview: TemplateOverview) -> NoReturn:
    """End the command with the reason why no store could pin or load these templates."""
    stored = [id for id in missing if any(template.store for template in overview.matching(id))]
    if stored:
        fail(
            f"the memory of {overview.holders_of(stored, workers=False)} has no room for all of {', '.join(stored)}",
            "Raise budget_bytes in the store's configuration. Edits read it from the disk meanwhile.",
        )
    elsewhere = [id for id in missing if overview.matching(id)]
    if elsewhere:
        fail(
            f"{', '.join(elsewhere)} is in no store, only in {overview.holders_of(elsewhere)}",
            "A store keeps complete recordings that fit its budget; bottega doctor says whether it has space.",
        )
    fail(f"no store has the template {', '.join(missing)}", _LISTS)


# Worker names that fit into a row.
_MOST_NAMES = 2
# A template counts as whole in memory from this share on: the rest, its parameters, is read from disk by an edit.
_WHOLE = 0.99
_TITLES = {kinds.ACTIVATIONS: "store", kinds.WORKER: "worker"}

_NOTHING_YET = "Nothing is recorded yet. The first edit of an image is, with --fidelity balanced or --masked-blocks."
_NOTHING_EVER = "No worker records edits: engine.edits.activations_mib in its configuration is 0."
_NO_STORE = (
    "No activation store has joined, so each worker has templates of its own and loses them when it ends "
    "(bottega logs activations)."
)


@command.command("list")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Maximum number of templates."
)
@address_option
@fleet_option
def list_command(*, limit: int, address: str) -> None:
    """List templates, and how full stores and workers are.

    The most recently used template comes first. "where" says whether the activation store has it in memory (or which
    share of it), or only on disk or in S3, and which workers have it in memory. "in use" means that an edit needs it
    now. "75 % of the image" means that the template covers that part: edits compute the rest and add it. "uses" counts
    the workers' requests to the store; an edit whose worker has everything in memory makes none.
    """
    with connect(address) as client:
        overview = client.templates()
    if overview.templates:
        _show_by_model(overview.templates[:limit])
        if (more := len(overview.templates) - limit) > 0:
            say(f"{more} more, used longer ago: --limit NUMBER")
    else:
        note(_NOTHING_YET if overview.records else _NOTHING_EVER)
    if overview.holders:
        print_table(holders_table(overview.holders))
        for text in shared_texts(overview.holders):
            say(text)
    _note_trouble(overview)


def _show_by_model(templates: Sequence[FleetTemplate]) -> None:
    models = list(dict.fromkeys(template.model for template in templates))
    for model in models:
        if len(models) > 1:
            say(f"{model}:")
        print_table(templates_table([template for template in templates if template.model == model]))


def templates_table(templates: Sequence[FleetTemplate]) -> PlainTable:
    """Return a table of one model's templates that fits into 80 columns."""
    table = PlainTable("template", "pixels", ">steps", ">size", ">uses", ">used", "where", optional=("used", "pixels"))
    for template in templates:
        table.add_row(
            short_hash(template.id),
            f"{template.width}x{template.height}",
            str(template.steps),
            size_text(template.size_bytes),
            str(template.uses),
            duration_text(template.idle_s),
            "; ".join([", ".join(_places(template)), *_states(template)]),
        )
    return table


def holders_table(holders: Sequence[TemplateHolder]) -> PlainTable:
    """Return a table of how full each service is."""
    has_store = any(holder.kind == kinds.ACTIVATIONS for holder in holders)
    table = PlainTable("kept by", ">templates", "in memory", *(["on disk"] if has_store else []))
    for holder in holders:
        on_disk = _room(holder.disk_bytes, holder.disk_budget_bytes) if holder.kind == kinds.ACTIVATIONS else ""
        table.add_row(
            f"{_TITLES.get(holder.kind, holder.kind)} {holder.name}",
            str(holder.templates),
            _room(holder.memory_bytes, holder.memory_budget_bytes),
            *([on_disk] if has_store else []),
        )
    return table


def shared_texts(holders: Sequence[TemplateHolder]) -> list[str]:
    """Return how full the object storage is that stores share, one text for each."""
    rooms = [_room(each.objects_bytes, each.objects_budget_bytes) for each in holders if each.objects_budget_bytes]
    return [f"In S3, for all stores: {room}" for room in dict.fromkeys(rooms)]


def _note_trouble(overview: TemplateOverview) -> None:
    for holder in overview.holders:
        if holder.trouble:
            note(f"The store {holder.name} records nothing now: {holder.trouble}. Edits are drawn meanwhile.")
        if holder.objects_trouble:
            note(f"The store {holder.name} cannot use its object storage now: {holder.objects_trouble}.")
    for silent in overview.silent:
        title = _TITLES.get(silent.kind, silent.kind)
        note(f"The templates of the {title} {silent.name} are not listed: {silent.error.message}")
    if not overview.has_store:
        note(_NO_STORE)


def _places(template: FleetTemplate) -> Iterator[str]:
    """Yield where a template is: in its store's memory or on its disk, and at which workers."""
    if template.store:
        in_memory = template.memory_bytes / template.size_bytes if template.size_bytes else 1.0
        far = "S3" if template.only_objects else "disk"
        yield "memory" if in_memory >= _WHOLE else f"memory {_share(in_memory)}" if in_memory else far
    if len(template.workers) > _MOST_NAMES:
        yield f"{len(template.workers)} workers"
    else:
        yield from template.workers


def _states(template: FleetTemplate) -> Iterator[str]:
    if template.pinned:
        yield "pinned"
    if template.in_use:
        yield "in use"
    if template.recording:
        yield "recording"
    elif 0 < template.valid_share < 1:
        yield f"{_share(template.valid_share)} of the image"


def _share(share: float) -> str:
    """Return a share as whole percents. A share above 0 and below 1 is never shown as 0 % or 100 %."""
    return f"{min(99, max(1, round(share * 100)))} %"


def _room(used_bytes: int, budget_bytes: int) -> str:
    used = size_text(used_bytes) if used_bytes else "0"
    return f"{used} of {size_text(budget_bytes)}" if budget_bytes else "nothing"


def _merge(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    """Remove the earlier edit's recording from the options if the command line decides whether one may be used."""
    if given.get("masked_blocks") is not None or given.get("fidelity") is not None:
        options.pop("recording", None)
        options.pop("masked_blocks", None)


def _describe(provenance: Provenance) -> Iterator[str]:
    use = provenance.mask
    if provenance.blocks_reused and use != MaskUse():
        blocks = share_text(provenance.blocks_reused / max(provenance.blocks_total, provenance.blocks_reused))
        where = f"the recording {short_hash(use.recording)}" if use.recording else "a recording"
        yield f"masked blocks: {blocks} of all blocks reused {where} outside the mask (approximate)"
        yield f"masked blocks: they computed {share_text(use.computed_share)} of their tokens"
    elif use.computed_all_because:
        yield f"everything was computed: {use.computed_all_because}"
    if use.recording and not provenance.blocks_reused and not use.kept_latents:
        yield f"latent and noise outside the mask are those of the recording {short_hash(use.recording)} (approximate)"
    if use.kept_latents:
        yield "kept for editing: the latents outside the mask are those that drew the image"
    if use.recorded:
        yield "recorded: later edits of this image can compute only the masked part"


PART = GenerationPart(
    options=(),
    stage=kinds.ACTIVATIONS,
    describe=_describe,
    merge=_merge,
    approximations=("masked_blocks", "recording"),
)


_NO_STORE_ADVICE = (
    "bottega fleet shows whether an activation store has joined; bottega logs activations says why one has not.\n"
    "Edits are drawn meanwhile: workers use what is in their own memory, and compute the rest."
)
_NOT_KEPT = (
    "--no-masked-blocks computes everything with the other parameters: another picture, which can be drawn again.\n"
    "Edits with --fidelity exact, or with --seed and no --fidelity, can always be drawn again."
)
_NOBODY_IDLE = "Try again when a worker is idle (bottega fleet), or have a busy one measure: --worker NAME."


def advice_for(error: BottegaError) -> str | None:
    """Return advice about an error of templates or activation stores; None for other errors."""
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
            return "bottega logs activations -n 50 says what is damaged. Edits compute what the store cannot provide."
    return None
