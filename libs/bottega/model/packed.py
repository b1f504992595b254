"""Forward passes of rows with several sizes: a transformer's layers get the tokens of all rows as one tensor.

Linear layers, norms and feed-forward layers compute every token by itself, so they run once for all rows, on packed
tokens, [tokens, features]. Modulation and attention run part by part; a part is adjacent rows of equal size. Padding
would instead compute as many tokens for each row as the largest one has. Rows of Z-Image are padded,
because Diffusers' own blocks for Z-Image take padded rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bottega.model.backbone import Activations, Block, Inputs, RowSpans
from bottega.model.backbones import MadeBackbone
from bottega.model.backbones.flux import FluxBackbone
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.backbones.z_image import ZImageBackbone
from bottega.model.joint_blocks import AllTokens, Rotary, RowLayout, run_block

Size = tuple[int, int]
"""Height and width of a latent."""


@dataclass(slots=True, kw_only=True)
class PackedActivations(Activations):
    """The state between two blocks.

    `hidden`, `context`, the tensors in `points` and `rotary` are packed. `rotary` belongs to the tokens of `hidden`.
    `embedding` is [rows, features].
    """

    image: RowLayout
    """Layout of `hidden`."""
    text: RowLayout
    """Layout of `context`."""
    sizes: tuple[Size, ...]
    """The size of each part."""
    text_rotary: Rotary | None = None
    """Rotary embedding of the tokens of `context`."""

    def row_of(self, tensor: Tensor, row: int) -> Tensor:
        return tensor[self.image.offsets[row] : self.image.offsets[row + 1]]

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        kept = [sum(part.first <= row < part.last for row in rows) for part in self.image.parts]
        self.sizes = tuple(size for size, count in zip(self.sizes, kept, strict=True) if count)
        self.embedding = self.embedding.index_select(0, index)
        self.image, token_index = _selected(self.image, rows, kept)
        token_index = token_index.to(index.device)
        self.hidden, self.rotary = self.hidden.index_select(0, token_index), _positions_of(self.rotary, token_index)
        self.points = dict.fromkeys(self.points, self.hidden)  # They are `hidden` itself.
        self.text, token_index = _selected(self.text, rows, kept)
        token_index = token_index.to(index.device)
        self.context = self.context.index_select(0, token_index)
        self.text_rotary = _positions_of(self.text_rotary, token_index)


def _positions_of(rotary: Rotary | None, token_index: Tensor) -> Rotary | None:
    return rotary and (rotary[0].index_select(0, token_index), rotary[1].index_select(0, token_index))


def _selected(layout: RowLayout, rows: Sequence[int], kept: Sequence[int]) -> tuple[RowLayout, Tensor]:
    """Return a layout of the selected rows, which must ascend, and the indexes of their tokens.

    Args:
        layout: The layout of all rows.
        rows: The selected rows.
        kept: Number of selected rows in each part.
    """
    offsets = layout.offsets
    counts = [(count, part.count) for count, part in zip(kept, layout.parts, strict=True) if count]
    index = torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows])
    return RowLayout.of(counts, layout.spans), index


class PackedBackbone:
    """A backbone for rows of several sizes, over the modules of a transformer that has a plain backbone, too.

    Its predictions equal those of the plain backbone, apart from rounding in sums.
    """

    def __init__(self, plain: Sd3Backbone | FluxBackbone) -> None:
        self.spans = RowSpans()
        self._plain = plain
        self.finish_needs = plain.finish_needs
        self._points = {*plain.finish_needs, *(point for block in plain.blocks for point in block.needs)}
        self.blocks: Sequence[Block] = [
            Block(name=block.name, run=self._joint(index), needs=block.needs)
            for index, block in enumerate(plain.blocks)
        ]

    def begin(self, parts: Sequence[Inputs]) -> PackedActivations:
        """Embed the inputs of each part."""
        ends = [0, *accumulate(len(part.sample) for part in parts)]
        states = []
        for part, rows in zip(parts, pairwise(ends), strict=True):
            with self.spans.packed(_row_offsets(*rows, ends[-1])):
                states.append(self._plain.begin(part))
        image = RowLayout.of([(len(state.hidden), state.hidden.shape[1]) for state in states], self.spans)
        text = RowLayout.of([(len(state.context), state.context.shape[1]) for state in states], self.spans)
        return PackedActivations(
            hidden=torch.cat([state.hidden.flatten(0, 1) for state in states]),
            embedding=torch.cat([state.embedding for state in states]),
            context=torch.cat([state.context.flatten(0, 1) for state in states]),
            image=image,
            text=text,
            sizes=tuple(state.size for state in states),
            rotary=_packed_positions(states, of_prompts=False),
            text_rotary=_packed_positions(states, of_prompts=True),
        )

    def finish(self, activations: Activations) -> list[Tensor]:
        """Return the prediction for each row, [channels, height, width]."""
        state = _packed(activations)
        made: list[Tensor] = []
        for part, hidden, size in zip(state.image.parts, state.image.cut(state.hidden), state.sizes, strict=True):
            embedding = state.embedding[part.first : part.last]
            rows = Activations(hidden=hidden, embedding=embedding, context=state.context, size=size)
            with self.spans.packed(_row_offsets(part.first, part.last, len(state.embedding))):
                made += self._plain.finish(rows)
        return made

    def _joint(self, index: int) -> Callable[[Activations], None]:
        """Return the function that runs a block."""
        path, is_last = self._plain.blocks[index].name, index == len(self._plain.blocks) - 1
        block = self._plain.network.get_submodule(path)

        def run(activations: Activations) -> None:
            state = _packed(activations)
            state.points.pop(index - 1, None)
            picture = AllTokens(tokens=state.hidden, layout=state.image, rotary=state.rotary)
            prompt = AllTokens(tokens=state.context, layout=state.text, rotary=state.text_rotary)
            state.hidden, state.context = run_block(block, path, picture, prompt, state.embedding, is_last=is_last)
            if index in self._points:
                state.points[index] = state.hidden

        return run


class PaddedBackbone:
    """Z-Image's backbone for rows of several sizes, whose tokens are padded to those of the largest one."""

    def __init__(self, plain: ZImageBackbone) -> None:
        self.spans, self.blocks, self.finish_needs = plain.spans, plain.blocks, plain.finish_needs
        self.begin, self.finish = plain.begin_rows, plain.finish_rows


MixedBackbone = PackedBackbone | PaddedBackbone
"""Backbones for rows of several sizes."""


def mixed_backbone(backbone: MadeBackbone) -> MixedBackbone | None:
    """Return the backbone for rows of several sizes; None for UNets, whose convolutions need maps of one size."""
    if isinstance(backbone, ZImageBackbone):
        return PaddedBackbone(backbone)
    return PackedBackbone(backbone) if isinstance(backbone, Sd3Backbone | FluxBackbone) else None


def _packed_positions(parts: Sequence[Activations], *, of_prompts: bool) -> Rotary | None:
    """Return the rotary embedding of the packed tokens of all rows; None if the network has none.

    Args:
        parts: The state of each part. Its `rotary` is for one row, and starts with the prompt's tokens.
        of_prompts: Whether to return the part for prompts; otherwise for pictures.
    """
    tables: list[Rotary] = []
    for part in parts:
        if part.rotary is not None:
            length, rows = part.context.shape[1], len(part.context)
            places = slice(length) if of_prompts else slice(length, None)
            cosines, sines = part.rotary
            tables.append((cosines[places].repeat(rows, 1), sines[places].repeat(rows, 1)))
    return (torch.cat([each[0] for each in tables]), torch.cat([each[1] for each in tables])) if tables else None


def _row_offsets(first: int, last: int, rows: int) -> tuple[int, ...]:
    """Return the offsets of all `rows` rows in a call that has only the rows [first, last), one item per row."""
    return tuple(min(max(row, first), last) - first for row in range(rows + 1))


def _packed(activations: Activations) -> PackedActivations:
    assert isinstance(activations, PackedActivations), "`begin` made the activations"
    return activations
