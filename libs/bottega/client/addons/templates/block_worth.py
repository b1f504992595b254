"""What a block profile means: what of a model's blocks is worth keeping, and how much a template takes.

A template has a forward of each step and each half of guidance. Of one of them a block's recording takes as many bytes
as the profile says, and spares computing what is not masked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

from bottega.planning.template_blocks import BlockValue, choose
from bottega.v1.activations_pb2 import BlockCost, BlockProfile

HALVES = 2
"""Of guidance: a prompt's and that of no prompt, or of the negative one."""

MASK_SHARE = 0.2
"""Of the image, for which savings are told: between the means of InstGenIE's traces, .11 to .35."""

_SIBLING = re.compile(r"\.transformer_blocks\.\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """Blocks of one part of the model, such as those of a transformer: all of one forward of one row.

    name: path of the part. blocks: in it; kept: of them, by the budget. size_bytes: recorded. full_s: to compute
    whole, masked_s: to compute the masked part of a mask of about MASK_SHARE alone.
    """

    name: str
    blocks: int
    kept: int
    size_bytes: int
    full_s: float
    masked_s: float

    @property
    def saved_s(self) -> float:
        """Seconds that its recording saves a forward; below 0 it costs some."""
        return self.full_s - self.masked_s

    @property
    def saved_s_per_mib(self) -> float:
        """What a MiB of its recording saves."""
        return self.saved_s / max(self.size_bytes / 2**20, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWorth:
    """What a profile says of templates of so many steps under a budget.

    share: of the tokens that were computed, nearest to MASK_SHARE. groups: those first that save most for each byte.
    forward_s, masked_s: of one row, in full, and with every block's recording. template_bytes: of all blocks.
    kept_bytes: of those that the budget keeps. kept_share: of the seconds that all blocks save.
    """

    share: float
    groups: tuple[BlockGroup, ...]
    forward_s: float
    masked_s: float
    template_bytes: int
    kept_bytes: int
    kept_share: float

    @property
    def blocks(self) -> int:
        """How many there are."""
        return sum(group.blocks for group in self.groups)

    @property
    def kept(self) -> int:
        """How many the budget keeps."""
        return sum(group.kept for group in self.groups)


def worth(profile: BlockProfile, *, steps: int, budget_bytes: int) -> BlockWorth:
    """budget_bytes: of one template; 0 is without bound."""
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
    """Place of the share that was measured nearest to this one; 0 where none was."""
    return min(range(len(profile.shares)), key=lambda place: abs(profile.shares[place] - share), default=0)


def masked_s(block: BlockCost, column: int) -> float:
    """Seconds of a row at that place's share; of one that was not measured, those of the whole row."""
    return block.masked_s[column] if column < len(block.masked_s) else block.full_s


def _kept(blocks: Sequence[BlockCost], column: int, budget_bytes: int | None) -> Set[str]:
    """As engines choose them: all, where all have room. budget_bytes: of one forward; None is without bound."""
    if budget_bytes is None or sum(block.size_bytes for block in blocks) <= budget_bytes:
        return {block.name for block in blocks}
    values = [
        BlockValue(name=block.name, saved_s=_saved_s(block, column), size_bytes=block.size_bytes) for block in blocks
    ]
    return choose(values, budget_bytes)


def _groups(blocks: Sequence[BlockCost], column: int, kept: Set[str]) -> tuple[BlockGroup, ...]:
    siblings: defaultdict[str, list[BlockCost]] = defaultdict(list)
    for block in blocks:
        siblings[_SIBLING.sub("", block.name)].append(block)
    groups = [
        BlockGroup(
            name=name,
            blocks=len(those),
            kept=sum(block.name in kept for block in those),
            size_bytes=sum(block.size_bytes for block in those),
            full_s=sum(block.full_s for block in those),
            masked_s=sum(masked_s(block, column) for block in those),
        )
        for name, those in siblings.items()
    ]
    return tuple(sorted(groups, key=lambda group: group.saved_s_per_mib, reverse=True))


def _saved_s(block: BlockCost, column: int) -> float:
    return block.full_s - masked_s(block, column)
