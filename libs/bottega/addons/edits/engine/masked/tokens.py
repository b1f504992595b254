"""The tokens that masked rows compute: at each resolution of a network, and packed for its layers.

A map is bool [height, width] at latent size, True for computed elements. The computed tokens of all rows are packed, so
that rows with different masks share a network's layer calls. "Whole" tensors are [rows, tokens, channels]. Packed ones
are [tokens, channels]: the computed tokens of the first row, then those of the second, and so on. Padding instead would
save nothing as soon as one row computes all tokens, because all other rows would be padded to its length.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from diffusers import FluxTransformer2DModel, ModelMixin, UNet2DConditionModel, ZImageTransformer2DModel
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from bottega.addons.edits.engine.activations import EditActivations
from bottega.device.devices import open_device
from bottega.model.backbone import Activations, RowSpans
from bottega.model.backbones.flux import FluxBackbone
from bottega.model.backbones.z_image import ZImageBackbone
from bottega.model.joint_blocks import RowLayout
from bottega.model.operations import Moves

if TYPE_CHECKING:
    from bottega.addons.edits.engine.masked.transformer import PromptProjections


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet:
    """The computed tokens of one map at one resolution."""

    mask: Tensor
    """bool [height, width], on the CPU."""
    index: Tensor
    """int64 [count], row-major and ascending, on the CPU."""

    @property
    def count(self) -> int:
        return len(self.index)

    @functools.cached_property
    def bits(self) -> int:
        """Return the mask as an integer whose highest bit is the first token, for comparisons without tensors."""
        return int.from_bytes(np.packbits(self.mask.numpy()).tobytes())

    @property
    def total(self) -> int:
        """Number of tokens of the whole picture."""
        return self.mask.numel()


class MaskTokens:
    """The token sets of one map, by resolution. A token is computed if any latent element under it is."""

    def __init__(self, computed: Tensor) -> None:
        # Copied once per mask, because this waits for the GPU.
        self._mask = computed.detach().to("cpu").bool()
        self._sets: dict[tuple[int, int], TokenSet] = {}
        self.full = bool(self._mask.all())

    def at(self, height: int, width: int) -> TokenSet:
        """Return the set for a feature map of this size. Raise ValueError if halving the latent never gives it."""
        known = self._sets.get((height, width))
        if known is None:
            mask = self._mask
            while mask.shape != (height, width):
                if mask.shape[0] < height or mask.shape[1] < width or mask.numel() == 1:
                    raise ValueError(f"a latent of {tuple(self._mask.shape)} has no level of {(height, width)}")
                mask = _pooled(mask, 2)
            known = self._sets[height, width] = TokenSet(mask=mask, index=mask.flatten().nonzero()[:, 0])
        return known


class TokenCache:
    """The token sets of the maps in use, found by the identity of their tensors, which must not be written to."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, MaskTokens] = WeakIdKeyDictionary()

    def of(self, computed: Tensor) -> MaskTokens:
        tokens = self._known.get(computed)
        if tokens is None:
            tokens = self._known[computed] = MaskTokens(computed)
        return tokens


def deepest_stride(network: ModelMixin) -> int:
    """Return the side length, in latent elements, of a token at the deepest level of a UNet, or of a transformer."""
    if not isinstance(network, UNet2DConditionModel):
        return patch_size(network)
    return int(2 ** (len(network.down_blocks) - 1))


def finest_stride(network: ModelMixin) -> int:
    """Return the side length, in latent elements, of a token at the finest attention level; 1 without attention."""
    if not isinstance(network, UNet2DConditionModel):
        return patch_size(network)
    levels = [level for level, block in enumerate(network.down_blocks) if getattr(block, "has_cross_attention", False)]
    if getattr(network.mid_block, "has_cross_attention", False):
        levels.append(len(network.down_blocks) - 1)
    return 1 << min(levels, default=0)


def patch_size(transformer: ModelMixin) -> int:
    """Return the side length, in latent elements, of a transformer's token."""
    # The configurations of Flux.1 and Z-Image do not contain the patch size.
    for network, backbone in ((FluxTransformer2DModel, FluxBackbone), (ZImageTransformer2DModel, ZImageBackbone)):
        if isinstance(transformer, network):
            return backbone.patch_size
    return int(transformer.config.patch_size)


def dilate(mask: Tensor, margin: int, stride: int) -> Tensor:
    """Return a mask with a margin of `margin` tokens, each of `stride` latent elements, bool [height, width]."""
    height, width = mask.shape
    tokens = _pooled(mask, stride)[None].float()
    grown = functional.max_pool2d(tokens, 2 * margin + 1, stride=1, padding=margin)[0] > 0
    return grown.repeat_interleave(stride, 0).repeat_interleave(stride, 1)[:height, :width].contiguous()


def share(computed: Tensor, stride: int) -> float:
    """Return the share of tokens that a map computes, for tokens with a side of `stride` latent elements."""
    return float(_pooled(computed, stride).float().mean())


def _pooled(mask: Tensor, stride: int) -> Tensor:
    """Return for each token whether any element under it is set. Rounds up, as padded downsampling convolutions do."""
    return functional.max_pool2d(mask[None].float(), stride, ceil_mode=True)[0] > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLevels:
    """Sizes that decide which tokens a mask needs."""

    finest: int
    """Side length, in latent elements, of a token at the finest attention level."""
    deepest: int
    """Side length, in latent elements, of a token at the deepest level."""
    margin: int
    """Width of the margin around the mask that is computed too, in tokens of the finest attention level."""
    blocks: frozenset[str]
    """Names of the outputs of transformer blocks."""

    def dilated(self, mask: Tensor) -> Tensor:
        """Return the area that an edit computes, bool [height, width], for its mask [1, 1, height, width]."""
        return dilate(mask[0, 0].cpu() > 0, self.margin, self.finest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """The computed tokens of each row at one resolution."""

    rows: int
    """Number of rows in whole tensors."""
    tokens: int
    """Number of tokens of each row in whole tensors."""
    layout: RowLayout
    """The computed tokens of each row, [tokens, channels]."""
    index: Tensor | None
    """Position of each packed token among rows * tokens, int64 [tokens]; None if every token is computed."""
    moves: Moves | None = None
    """Kernels that pack and merge; None for plain torch."""
    slots: Tensor | None = None

    def pack(self, whole: Tensor) -> Tensor:
        """Return the items of a whole tensor."""
        if self.index is not None and self.moves is not None:
            return self.moves.pack(whole, self.index)
        flat = whole.reshape(self.rows * self.tokens, -1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def merge(self, items: Tensor, recorded: Sequence[Tensor | None]) -> Tensor:
        """Return a whole tensor from computed items and the recorded tokens of each row.

        `recorded` has [tokens, channels] of any dtype for each row, or None for rows that compute all tokens.
        """
        if self.index is None:
            return items.view(self.rows, self.tokens, -1)
        if self.moves is not None and self.slots is not None:
            return self.moves.merge(items, self.index, self.slots, recorded, self.tokens)
        whole = items.new_empty(self.rows, self.tokens, items.shape[-1])
        rests = [rest for rest in recorded if rest is not None]
        joined = adjacent(rests) if len(rests) == self.rows else None
        if joined is not None:
            whole.copy_(joined, non_blocking=True)
        else:
            for row, rest in zip(whole, recorded, strict=True):
                if rest is not None:
                    row.copy_(rest, non_blocking=True)
        whole.view(self.rows * self.tokens, -1).index_copy_(0, self.index, items)
        return whole


def pack_rows(
    sets: Sequence[TokenSet | None],
    tokens: int,
    device: torch.device,
    *,
    moves: Moves | None = None,
    spans: RowSpans | None = None,
) -> Packing:
    """Return the packing of rows with these token sets. None stands for a row that computes all `tokens`."""
    counts = [tokens if each is None else each.count for each in sets]
    index = slots = None
    if sum(counts) != len(sets) * tokens:
        everything = torch.arange(tokens)
        places = [row * tokens + (everything if each is None else each.index) for row, each in enumerate(sets)]
        joined = torch.cat(places)
        to_device = open_device(device).to_device
        index = to_device(joined)
        slots = None if moves is None else to_device(_slots(joined, len(sets) * tokens))
    return Packing(
        rows=len(sets),
        tokens=tokens,
        layout=RowLayout.of([(len(list(rows)), count) for count, rows in groupby(counts)], spans or RowSpans()),
        index=index,
        moves=moves,
        slots=slots,
    )


def adjacent(rows: Sequence[Tensor]) -> Tensor | None:
    """Return tensors of one shape as one view [rows, ...] if they are adjacent in memory; None otherwise."""
    first = rows[0]
    storage, begin, size = first.untyped_storage().data_ptr(), first.storage_offset(), first.numel()
    if not first.is_contiguous():
        return None
    for place, row in enumerate(rows):
        if row.untyped_storage().data_ptr() != storage or row.storage_offset() != begin + place * size:
            return None
    return first.as_strided((len(rows), *first.shape), (size, *first.stride()))


def _slots(index: Tensor, places: int) -> Tensor:
    """Return the index of the item at each position, int32 [places]; -1 where there is none."""
    slots = torch.full((places,), -1, dtype=torch.int32)
    slots[index] = torch.arange(len(index), dtype=torch.int32)
    return slots


@dataclass(slots=True, kw_only=True)
class MaskedActivations(Activations):
    """The state of a masked forward pass, which each block receives from the block before it."""

    edits: list[EditActivations | None]
    """The edit of each row; None for a plain row."""
    cache: TokenCache
    """Token sets of the masks in use."""
    spans: RowSpans
    """Where rows are in the tensors of the current layer call."""
    prompts: list[PromptProjections] = field(default_factory=list)
    """Cached projections of each row's prompt; empty if they are not cached."""
    moves: Moves | None = None
    """Kernels that move tokens and tiles; None for plain torch."""
    _packings: dict[tuple[int, int, tuple[bool, ...]], Packing] = field(init=False, default_factory=dict)

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keep only these rows, in this order. `index` has the same values as int64 on the rows' device."""
        Activations.select(self, rows, index)
        self.edits = [self.edits[row] for row in rows]
        self.prompts = [self.prompts[row] for row in rows] if self.prompts else []
        self._packings.clear()

    def tokens_of(self, row: int) -> MaskTokens | None:
        """Return the computed tokens of a row; None if all are computed."""
        edit = self.edits[row]
        if edit is None or edit.computed is None or edit.recorded is None:
            return None
        tokens = self.cache.of(edit.computed)
        return None if tokens.full else tokens

    def recorded(self, name: str) -> list[Tensor | None]:
        """Return the recorded tensor of this name for each row; None for rows that must compute all tokens."""
        return [
            edit.recorded.get(name) if edit and edit.recorded is not None and self.tokens_of(row) else None
            for row, edit in enumerate(self.edits)
        ]

    def put(self, name: str, outputs: Tensor) -> None:
        """Record outputs [rows, ...], of those rows that record."""
        for edit, output in zip(self.edits, outputs, strict=True):
            if edit is not None and edit.sink is not None:
                edit.sink.put(name, output)

    def packing(self, size: tuple[int, int], masked: Sequence[bool]) -> Packing:
        """Return the packing at a size in tokens: the computed tokens of masked rows, all tokens of others."""
        height, width = size
        key = (height, width, tuple(masked))
        known = self._packings.get(key)
        if known is None:
            tokens = [self.tokens_of(row) if reads else None for row, reads in enumerate(masked)]
            sets = [None if each is None else each.at(height, width) for each in tokens]
            known = self._packings[key] = pack_rows(
                sets, height * width, self.hidden.device, moves=self.moves, spans=self.spans
            )
        return known
