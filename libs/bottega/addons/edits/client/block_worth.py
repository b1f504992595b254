"""The meaning of a block profile: which of a model's blocks are worth keeping, and how much a template takes.

A template has one forward pass for each step and each half of guidance. The profile says how many bytes a block's
recording of one forward pass takes. An edit that has it computes only the masked part of the block.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

from bottega.addons.edits.client.types import BlockProfile, ProfiledBlock
from bottega.addons.edits.planning.template_blocks import BlockValue, choose

HALVES = 2
"""Halves of guidance: with the prompt, and without it or with the negative one."""

MASK_SHARE = 0.2
"""Share of the image for which savings are stated: between the means of InstGenIE's traces, .11 to .35."""

_SIBLING = re.compile(r"\.transformer_blocks\.\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """The blocks of one part of the model, such as those of a transformer, in one forward pass of one row."""

    name: str
    """Path of the part."""
    blocks: int
    """Number of blocks."""
    kept: int
    """Number of blocks that the budget keeps."""
    size_bytes: int
    """Bytes of the recording."""
    full_s: float
    """Seconds to compute the part whole."""
    masked_s: float
    """Seconds to compute only a mask of about MASK_SHARE."""

    @property
    def saved_s(self) -> float:
        """Seconds that the recording saves in a forward pass; below 0 it costs time."""
        return self.full_s - self.masked_s

    @property
    def saved_s_per_mib(self) -> float:
        """Seconds that a MiB of the recording saves."""
        return self.saved_s / max(self.size_bytes / 2**20, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWorth:
    """The sizes and savings of templates with a number of steps, under a budget."""

    share: float
    """Measured share of the tokens nearest to MASK_SHARE."""
    groups: tuple[BlockGroup, ...]
    """Groups of blocks; those that save most for their bytes come first."""
    forward_s: float
    """Seconds of a whole forward pass of one row."""
    masked_s: float
    """Seconds of a forward pass with the recordings of all blocks."""
    template_bytes: int
    """Bytes of a template with all blocks."""
    kept_bytes: int
    """Bytes of a template with the blocks that the budget keeps."""
    kept_share: float
    """Share of the seconds that all blocks save, which the kept blocks save."""

    @property
    def blocks(self) -> int:
        """Number of all blocks."""
        return sum(group.blocks for group in self.groups)

    @property
    def kept(self) -> int:
        """Number of blocks that the budget keeps."""
        return sum(group.kept for group in self.groups)


def worth(profile: BlockProfile, *, steps: int, budget_bytes: int) -> BlockWorth:
    """Return what templates of a model take and save.

    Args:
        steps: Denoising steps of a template.
        budget_bytes: Bytes that one template may take; 0 for no limit.
    """
    column = nearest_share(profile)
    forwards = HALVES * steps
    kept = _kept(profile.blocks, column, budget_bytes // forwards if budget_bytes else None)
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
    """Return the index of the measured share nearest to this one; 0 if no share was measured."""
    return min(range(len(profile.shares)), key=lambda index: abs(profile.shares[index] - share), default=0)


def masked_s(block: ProfiledBlock, column: int) -> float:
    """Return the seconds of a row at the share with this index; those of the whole row if it was not measured."""
    return block.masked_s[column] if column < len(block.masked_s) else block.full_s


def _kept(blocks: Sequence[ProfiledBlock], column: int, budget_bytes: int | None) -> Set[str]:
    """Return the names of the blocks that an engine keeps within a budget for one forward pass; None is no limit."""
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
