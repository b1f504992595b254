"""`bottega templates profile`: which blocks of a model are worth the bytes of their recordings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import click

from bottega import kinds
from bottega.addons.edits.client.block_worth import BlockGroup, BlockWorth, worth
from bottega.addons.edits.client.types import BlockProfile
from bottega.client.cli.options import address_option, connect, fleet_option, timeout_option
from bottega.client.cli.terminal import (
    PlainTable,
    fail,
    note,
    print_facts,
    print_table,
    say,
    share_text,
    short_hash,
    size_text,
)
from bottega.client.sdk.clients import Client
from bottega.client.types.models import ServedModel

_STEPS = 50
_MOST_ROWS = 20
# The suffix of down_blocks.1 and mid_block, which a reader does not need.
_SUFFIX = re.compile(r"_blocks?\b")
_HOW_TO_READ = (
    "Each row is a part of the model; x10 means ten blocks. Size is its recording for one forward pass of one row. In "
    "full and masked are the milliseconds to compute it. ms/MiB is the time that a MiB of recording saves; a negative "
    "one costs time. Parts that save most for their bytes are kept first."
)
_PIXELS = click.IntRange(min=8)


@click.command("profile")
@click.option("--model", help="Model to measure; default: the only one that is served.")
@click.option("--worker", metavar="NAME", help="Worker that measures; default: one that draws nothing now.")
@click.option("--width", type=_PIXELS, help="Width of the picture in pixels; default: the model's own.")
@click.option("--height", type=_PIXELS, help="Height of the picture in pixels; default: the model's own.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Steps of a template; default: the model's.")
@click.option(
    "--budget-mib",
    type=click.IntRange(min=1),
    help="MiB that one template may take; default: the smallest budget in the fleet.",
)
@click.option("--all", "every", is_flag=True, help=f"Show every part of the model, not only {_MOST_ROWS}.")
@click.option("--kept", is_flag=True, help="Measure nothing; show the profiles that stores keep.")
@timeout_option
@address_option
@fleet_option
def command(
    *,
    model: str | None,
    worker: str | None,
    width: int | None,
    height: int | None,
    steps: int | None,
    budget_mib: int | None,
    every: bool,
    kept: bool,
    timeout_s: float,
    address: str,
) -> None:
    """Measure which blocks of a model are worth keeping.

    A template with every block of a large model takes many GiB. If a store or a worker has less room, it keeps the
    blocks that save most time for their bytes; which these are depends on the model and the device. An idle worker
    measures it, which takes seconds, or minutes without a GPU, and the stores keep the result. Measure again when
    devices change; --kept shows earlier results.
    """
    with connect(address) as client:
        served = {one.model_hash: one for one in client.models()}
        budget_bytes = budget_mib << 20 if budget_mib is not None else _budget(client)
        if kept:
            profiles = _profiles_of(client, model, served)
        else:
            note("measuring ...")
            measured = client.profile_blocks(
                model=model, worker=worker, width=width or 0, height=height or 0, timeout_s=timeout_s
            )
            profiles = [measured.profile]
    for profile in profiles:
        known = served.get(profile.model_hash)
        show(
            profile,
            _name(profile, served),
            steps or (known.default_steps if known else 0) or _STEPS,
            budget_bytes,
            every,
        )
    if not kept:
        stores = ", ".join(measured.stores)
        note(f"Kept by {stores}." if stores else "No store keeps it: no activation store has joined (bottega fleet).")


def show(profile: BlockProfile, name: str, steps: int, budget_bytes: int, every: bool) -> None:
    """Print a profile: its blocks, those worth most first, then the sums.

    Args:
        budget_bytes: Bytes that one template may take; 0 for no limit.
    """
    found = worth(profile, steps=steps, budget_bytes=budget_bytes)
    rows = found.groups if every else found.groups[:_MOST_ROWS]
    table = PlainTable(
        "part of the model", ">size", ">in full", ">masked", ">ms/MiB", "kept", wraps=("part of the model",)
    )
    for group in rows:
        table.add_row(*_row(group))
    print_table(table)
    if len(rows) < len(found.groups):
        say(f"{len(found.groups) - len(rows)} more parts save less; --all shows them.")
    say(f"{name}, {profile.width}x{profile.height}, {profile.dtype}:")
    print_facts(_facts(found, profile, steps, budget_bytes))


def _row(group: BlockGroup) -> tuple[str, ...]:
    kept = f"{group.kept} of {group.blocks}" if 0 < group.kept < group.blocks else "yes" if group.kept else "no"
    return (
        _SUFFIX.sub("", group.name) + (f" x{group.blocks}" if group.blocks > 1 else ""),
        size_text(group.size_bytes),
        _three_digits(group.full_s * 1e3),
        _three_digits(group.masked_s * 1e3),
        _three_digits(group.saved_s_per_mib * 1e3),
        kept,
    )


def _facts(found: BlockWorth, profile: BlockProfile, steps: int, budget_bytes: int) -> Iterator[tuple[str, str]]:
    yield "forward pass of a row", _milliseconds(found.forward_s)
    masked = f"{_milliseconds(found.masked_s)} if {share_text(found.share)} of the image is computed"
    yield "with all recordings", f"{masked} and nothing has to be loaded"
    whole = f"{size_text(found.template_bytes)} with every block, for both halves of guidance"
    yield f"a template, {steps} steps", whole
    yield "the budget", _kept(found, budget_bytes)
    yield "how to read it", _HOW_TO_READ
    if profile.about:
        yield "measured", profile.about


def _kept(found: BlockWorth, budget_bytes: int) -> str:
    if not budget_bytes:
        return "none for a template (template_mib), so every block is kept while the store has room"
    kept = f"{found.kept} of {found.blocks} blocks, {size_text(found.kept_bytes)}"
    return (
        f"{size_text(budget_bytes)} for a template keeps {kept}: {share_text(found.kept_share)} of the possible savings"
    )


def _budget(client: Client) -> int:
    """Return the bytes of a template that every store and worker has room for; 0 without a store, or without limits."""
    holders = client.templates().holders
    if not any(holder.kind == kinds.ACTIVATIONS for holder in holders):
        return 0
    bounded = [holder for holder in holders if holder.template_budget_bytes]
    least = min(bounded, key=lambda holder: holder.template_budget_bytes, default=None)
    if least is None:
        return 0
    if least.kind == kinds.WORKER:
        room = size_text(least.template_budget_bytes)
        note(f"{least.name} has {room} for recordings (engine.edits.activations_mib), which limits its templates.")
    return least.template_budget_bytes


def _profiles_of(client: Client, model: str | None, served: Mapping[str, ServedModel]) -> list[BlockProfile]:
    profiles = client.block_profiles()
    found = [profile for profile in profiles if model in (None, _name(profile, served), profile.model_hash)]
    if not found:
        of_model = f"of {model} " if model else ""
        fail(f"no store keeps a profile {of_model}yet", "bottega templates profile measures one.")
    return found


def _name(profile: BlockProfile, served: Mapping[str, ServedModel]) -> str:
    known = served.get(profile.model_hash)
    return known.name if known else short_hash(profile.model_hash)


def _milliseconds(seconds: float) -> str:
    return f"{_three_digits(seconds * 1e3)} ms"


def _three_digits(number: float) -> str:
    """Return a number with three significant digits and no exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}" if abs(number) >= 1e-3 else "0"
