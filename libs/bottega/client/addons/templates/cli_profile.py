"""`bottega templates profile`: which blocks of a model are worth the bytes of their recordings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import click

from bottega import kinds
from bottega.client.addons.templates.block_worth import BlockGroup, BlockWorth, worth
from bottega.client.cli.options import address_option, connect, fleet_option, timeout_option
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say, share_text, short_hash, size_text
from bottega.client.sdk.clients import Client
from bottega.client.types.models import ServedModel
from bottega.v1.activations_pb2 import BlockProfile

_STEPS = 50
_MOST_ROWS = 20
# Of down_blocks.1 and mid_block, which need not be said.
_SUFFIX = re.compile(r"_blocks?\b")
_HOW_TO_READ = (
    "A line is a part of the model, x10 of ten blocks. Size: what is recorded of it in a forward of one row. In full, "
    "masked: milliseconds to compute it. ms/MiB: what a MiB of recording saves; a negative one costs more than it "
    "saves. What saves most for its bytes is kept first."
)
_PIXELS = click.IntRange(min=8)


@click.command("profile")
@click.option("--model", help="To measure; default: the only one that is served.")
@click.option("--worker", metavar="NAME", help="That measures; default: one that draws nothing now.")
@click.option("--width", type=_PIXELS, help="Of the picture, in pixels; default: the model's own.")
@click.option("--height", type=_PIXELS, help="Its height; default: the model's own.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Of the template that is told of; default: the model's.")
@click.option("--budget-mib", type=click.IntRange(min=1), help="Of one template; default: the least that there is.")
@click.option("--all", "every", is_flag=True, help=f"Every part of the model, not {_MOST_ROWS} of them.")
@click.option("--kept", is_flag=True, help="Measure nothing; show what stores keep.")
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
    """Measure what each block of a model takes, and have the stores keep that.

    A template of every block of a large model takes many GiB. Within what a store and the worker that records have room
    for, the blocks are kept that save most time for each byte, and which those are depends on model and device. A
    worker that draws nothing runs the model, which takes seconds, or minutes without a GPU. Measure again after a
    change of devices; --kept shows what was measured.
    """
    with connect(address) as client:
        served = {each.model_hash: each for each in client.models()}
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
        whose = ", ".join(measured.stores)
        note(f"Kept by {whose}." if whose else "Nobody keeps it: no activation store has joined (bottega fleet).")


def show(profile: BlockProfile, name: str, steps: int, budget_bytes: int, every: bool) -> None:
    """Prints it: what is worth most first, then what that comes to. budget_bytes: of one template; 0 is none."""
    found = worth(profile, steps=steps, budget_bytes=budget_bytes)
    rows = found.groups if every else found.groups[:_MOST_ROWS]
    table = PlainTable(
        "part of the model", ">size", ">in full", ">masked", ">ms/MiB", "kept", wraps=("part of the model",)
    )
    for group in rows:
        table.add_row(*_row(group))
    print_table(table)
    if len(rows) < len(found.groups):
        say(f"{len(found.groups) - len(rows)} more parts that save less: --all")
    facts = PlainTable("", "")
    for label, text in _facts(found, profile, steps, budget_bytes):
        facts.add_row(label, text)
    say(f"{name}, {profile.width}x{profile.height}, {profile.dtype}:")
    print_table(facts)


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
    yield "a forward of one row", _milliseconds(found.forward_s)
    masked = f"{_milliseconds(found.masked_s)}, where {share_text(found.share)} of the image is computed"
    yield "with all recordings", f"{masked}, and nothing has to be loaded"
    whole = f"{size_text(found.template_bytes)} if every block is kept, of both halves of guidance"
    yield f"a template, {steps} steps", whole
    yield "the budget", _kept(found, budget_bytes)
    yield "how to read it", _HOW_TO_READ
    if profile.about:
        yield "measured", profile.about


def _kept(found: BlockWorth, budget_bytes: int) -> str:
    if not budget_bytes:
        return "none for a template (template_mib): every block is kept, while the store has room"
    kept = f"{found.kept} of {found.blocks} blocks, {size_text(found.kept_bytes)}"
    return f"{size_text(budget_bytes)} for a template keeps {kept}: {share_text(found.kept_share)} of what all save"


def _budget(client: Client) -> int:
    """Of one template: what every store, and every worker that records, has room for; 0 without a store, or bound."""
    holders = client.templates().holders
    if not any(each.kind == kinds.ACTIVATIONS for each in holders):
        return 0
    bounded = [each for each in holders if each.template_budget_bytes]
    least = min(bounded, key=lambda each: each.template_budget_bytes, default=None)
    if least is None:
        return 0
    if least.kind == kinds.WORKER:
        room = size_text(least.template_budget_bytes)
        note(f"{least.name} has room for {room} of recordings (engine.activations_mib), which bounds its templates.")
    return least.template_budget_bytes


def _profiles_of(client: Client, model: str | None, served: Mapping[str, ServedModel]) -> list[BlockProfile]:
    found = [each for each in client.block_profiles() if model in (None, _name(each, served), each.model_hash)]
    if not found:
        whose = f"of {model} " if model else ""
        fail(f"no store keeps a profile {whose}yet", "bottega templates profile measures one.")
    return found


def _name(profile: BlockProfile, served: Mapping[str, ServedModel]) -> str:
    known = served.get(profile.model_hash)
    return known.name if known else short_hash(profile.model_hash)


def _milliseconds(seconds: float) -> str:
    return f"{_three_digits(seconds * 1e3)} ms"


def _three_digits(number: float) -> str:
    """So many count, and no exponent is written."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}" if abs(number) >= 1e-3 else "0"
