"""`bottega templates profile`: which blocks of a model are worth the bytes that their recorded activations take.

A template has activations of two forward passes for each step: the conditional and the unconditional one of guidance.
The profile says how many bytes a block takes in one of them. An edit with a block's activations computes only the
masked part of the block.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import click

from bottega import kinds
from bottega.addons.edits.client.types import BlockProfile, ProfiledBlock
from bottega.addons.edits.planning import BlockValue, choose
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

HALVES = 2
"""Recorded forward passes of a step: the conditional and the unconditional one of classifier-free guidance."""

MASK_SHARE = 0.2
"""Share of the image in the mask for which savings are shown: between the means of InstGenIE's traces, .11 to .35."""

_SIBLING = re.compile(r"\.transformer_blocks\.\d+$")

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
@click.option("--worker", metavar="NAME", help="Worker that measures; default: an idle one.")
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
    """Measure which blocks of a model are worth keeping in templates.

    A template with every block of a large model takes many GiB. Stores and workers with a smaller budget keep the
    blocks that save the most time per byte. Which these are depends on the model and the device. An idle worker
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
    """Print a profile: its blocks, those that save the most time per byte first, then the sums.

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
    """Return the smallest budget in bytes that a store or worker has for one template; 0 without stores or limits."""
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
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}" if abs(number) >= 1e-3 else "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """The blocks of one part of the model, such as a transformer, in one forward pass of one row."""

    name: str
    """Path of the part in the model."""
    blocks: int
    """Number of blocks."""
    kept: int
    """Number of blocks that fit into the budget."""
    size_bytes: int
    """Bytes of the blocks' recorded activations."""
    full_s: float
    """Seconds to compute all tokens."""
    masked_s: float
    """Seconds to compute only the tokens of a mask of about MASK_SHARE."""

    @property
    def saved_s(self) -> float:
        """Seconds that the recorded activations save in a forward pass; negative if using them is slower."""
        return self.full_s - self.masked_s

    @property
    def saved_s_per_mib(self) -> float:
        """Seconds that one MiB of recorded activations saves."""
        return self.saved_s / max(self.size_bytes / 2**20, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWorth:
    """The size of a model's templates, and the time that they save."""

    share: float
    """The measured share of masked tokens that is nearest to MASK_SHARE."""
    groups: tuple[BlockGroup, ...]
    """Groups of blocks, those that save the most time per byte first."""
    forward_s: float
    """Seconds of a complete forward pass of one row."""
    masked_s: float
    """Seconds of a forward pass of one row that uses the recorded activations of all blocks."""
    template_bytes: int
    """Bytes of a template with all blocks."""
    kept_bytes: int
    """Bytes of a template with the blocks that fit into the budget."""
    kept_share: float
    """Time that the blocks in the budget save, as a share of the time that all blocks would save."""

    @property
    def blocks(self) -> int:
        """Number of all blocks."""
        return sum(group.blocks for group in self.groups)

    @property
    def kept(self) -> int:
        """Number of blocks that fit into the budget."""
        return sum(group.kept for group in self.groups)


def worth(profile: BlockProfile, *, steps: int, budget_bytes: int) -> BlockWorth:
    """Return how many bytes the templates of a model take, and how many seconds they save.

    Args:
        steps: Denoising steps of a template.
        budget_bytes: Bytes that one template may take; 0 for no limit.
    """
    column = nearest_share(profile)
    forwards = HALVES * steps
    kept = _kept_blocks(profile.blocks, column, budget_bytes // forwards if budget_bytes else None)
    saved_s = sum(max(0.0, _saved_s(block, column)) for block in profile.blocks)
    saved_kept_s = sum(max(0.0, _saved_s(block, column)) for block in profile.blocks if block.name in kept)
    return BlockWorth(
        share=profile.shares[column] if profile.shares else 1.0,
        groups=_groups(profile.blocks, column, kept),
        forward_s=profile.forward_s,
        masked_s=profile.forward_s - saved_s,
        template_bytes=forwards * sum(block.size_bytes for block in profile.blocks),
        kept_bytes=forwards * sum(block.size_bytes for block in profile.blocks if block.name in kept),
        kept_share=saved_kept_s / saved_s if saved_s else 1.0,
    )


def nearest_share(profile: BlockProfile, share: float = MASK_SHARE) -> int:
    """Return the index of the measured share nearest to `share`; 0 if no share was measured."""
    return min(range(len(profile.shares)), key=lambda index: abs(profile.shares[index] - share), default=0)


def masked_s(block: ProfiledBlock, column: int) -> float:
    """Return the seconds of a block at the share with this index; those for all tokens if that was not measured."""
    return block.masked_s[column] if column < len(block.masked_s) else block.full_s


def _kept_blocks(blocks: Sequence[ProfiledBlock], column: int, budget_bytes: int | None) -> Set[str]:
    """Return the names of the blocks that fit into a budget for one forward pass; None means no limit."""
    if budget_bytes is None or sum(block.size_bytes for block in blocks) <= budget_bytes:
        return {block.name for block in blocks}
    values = [
        BlockValue(name=block.name, saved_s=_saved_s(block, column), size_bytes=block.size_bytes) for block in blocks
    ]
    return choose(values, budget_bytes)


def _groups(blocks: Sequence[ProfiledBlock], column: int, kept: Set[str]) -> tuple[BlockGroup, ...]:
    siblings: defaultdict[str, list[ProfiledBlock]] = defaultdict(list)
    for block in blocks:
        siblings[_SIBLING.sub("", block.name)].append(block)
    groups = [
        BlockGroup(
            name=name,
            blocks=len(members),
            kept=sum(block.name in kept for block in members),
            size_bytes=sum(block.size_bytes for block in members),
            full_s=sum(block.full_s for block in members),
            masked_s=sum(masked_s(block, column) for block in members),
        )
        for name, members in siblings.items()
    ]
    return tuple(sorted(groups, key=lambda group: group.saved_s_per_mib, reverse=True))


def _saved_s(block: ProfiledBlock, column: int) -> float:
    return block.full_s - masked_s(block, column)
