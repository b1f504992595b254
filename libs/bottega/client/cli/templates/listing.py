"""`bottega templates list`: which images are recorded for edits, where that is, and how much room it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from bottega import kinds
from bottega.client.addons.templates.overview import FleetTemplate, TemplateHolder, TemplateOverview
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, note, print_table, say, short_hash, size_text
from bottega.v1.activations_pb2 import Template

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


@click.command("list")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="How many at most.")
@address_option
@fleet_option
def command(*, limit: int, address: str) -> None:
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
