"""`bottega templates`: which images workers have recorded for edits, and how to have them forget these."""

from __future__ import annotations

from collections.abc import Sequence

import click

from bottega.client.addons.templates.client import WorkerTemplates
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.list_group import ListGroup
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
from bottega.v1.activations_pb2 import Template

_MINUTE_S, _HOUR_S = 60.0, 3600.0


@click.group("templates", cls=ListGroup)
def command() -> None:
    """Look after templates, the images whose edits workers have recorded: list, drop.

    \b
      bottega templates                  which images are recorded, and how much memory that takes
      bottega templates drop 3f0a91c25e  forgets one; its next edit computes the whole picture, and records again
      bottega templates drop --all
      bottega edit star.png --mask mask.png "a green star" --masked-blocks
    """


@command.command("list")
@address_option
@fleet_option
def list_command(*, address: str) -> None:
    """List the templates of every worker."""
    with connect(address) as client:
        workers = client.templates()
    if any(worker.templates for worker in workers):
        table = PlainTable("template", "worker", "model", "size", ">steps", ">bytes", ">uses", ">used", "state")
        for worker in workers:
            for template in worker.templates:
                table.add_row(short_hash(template.id), worker.worker, *_facts(template))
        table.add_caption("; ".join(map(_room, workers)))
        print_table(table)
    elif any(worker.budget_bytes for worker in workers):
        note(
            "Nothing is recorded yet: the first edit of an image is, unless it is exact (--fidelity, --masked-blocks)."
        )
    else:
        note("No worker records anything: activations_mib, of the engine in its configuration, is 0.")


@command.command("drop")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All of them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_option
@fleet_option
def drop(*, ids: tuple[str, ...], every: bool, yes: bool, address: str) -> None:
    """Have workers forget templates, each ID as `bottega templates` shows it."""
    if bool(ids) == every:
        raise click.UsageError("say which: the ID of a template, or several, or --all.")
    with connect(address) as client:
        if every and not yes:
            note("every edit will compute the whole picture once more")
            confirm("Drop all templates?")
        dropped = {id: client.drop_templates(id) for id in ids or ("",)}
        missing = [id for id, number in dropped.items() if id and not number]
        there = client.templates() if missing else ()
    number = sum(dropped.values())
    if number or not missing:
        say(f"{number} template{'' if number == 1 else 's'} dropped")
    if missing:
        _fail(missing, [template.id for worker in there for template in worker.templates])


def _fail(missing: Sequence[str], there: Sequence[str]) -> None:
    used = [id for id in missing if any(each.startswith(id) for each in there)]
    if used:
        fail(f"{', '.join(used)} is used by an edit now", "Try again when that has ended.")
    fail(f"no worker has the template {', '.join(missing)}", "bottega templates lists those that there are.")


def _facts(template: Template) -> tuple[str, ...]:
    return (
        template.model,
        f"{template.width}x{template.height}",
        str(template.steps),
        size_text(template.size_bytes),
        str(template.uses),
        f"{_duration(template.idle_s)} ago",
        _state(template),
    )


def _state(template: Template) -> str:
    """What somebody who waits for it, or wants to drop it, has to know."""
    states = [f"{share_text(template.valid_share)} of the image"] if template.valid_share < 1 else []
    states += ["being recorded"] if template.recording else []
    states += ["in use"] if template.in_use else []
    return ", ".join(states)


def _room(worker: WorkerTemplates) -> str:
    return f"{worker.worker}: {size_text(worker.used_bytes)} of {size_text(worker.budget_bytes)}"


def _duration(seconds: float) -> str:
    if seconds >= _HOUR_S:
        return f"{seconds / _HOUR_S:.1f} h"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds >= _MINUTE_S else f"{seconds:.0f} s"
