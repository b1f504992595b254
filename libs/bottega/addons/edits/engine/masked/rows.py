"""The rows of one masked forward pass: which tokens they compute, and which activations they reuse or record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega.addons.edits.engine.activations import EditActivations
from bottega.addons.edits.engine.masked.cross_attention import PromptProjections
from bottega.addons.edits.engine.masked.packing import Packing, pack_rows
from bottega.addons.edits.engine.masked.tokens import MaskTokens, TokenCache
from bottega.model.backbone import Activations, RowSpans
from bottega.model.operations import Moves


@dataclass(slots=True, kw_only=True)
class MaskedActivations(Activations):
    """The state of a masked forward pass, which each block receives from the block before it."""

    edits: list[EditActivations | None]
    """The edit of each row; None for a plain row."""
    cache: TokenCache
    """Token sets of the masks in use."""
    spans: RowSpans
    """Where rows are in the tensors of the current layer call."""
    prompts: list[PromptProjections]
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
            known = self._packings[key] = pack_rows(sets, height * width, self.hidden.device, self.moves)
        return known
