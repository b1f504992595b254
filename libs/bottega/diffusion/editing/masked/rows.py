"""The rows of one masked forward: what of each is computed, what was recorded of it, and what it records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega.diffusion.editing.masked.cross_attention import PromptProjections
from bottega.diffusion.editing.masked.packing import Packing, RowSpans, pack_rows
from bottega.diffusion.editing.masked.tokens import MaskTokens, TokenCache
from bottega.diffusion.model.backbone import Activations
from bottega.diffusion.operations import Moves
from bottega.diffusion.rows import RowActivations


@dataclass(slots=True, kw_only=True)
class MaskedActivations(Activations):
    """What the blocks of a masked backbone pass on.

    edits: by row; None for a plain one. cache: of token sets. spans: where rows lie in the layer call in hand.
    prompts: by row, what is kept of its prompt; empty where nothing is.
    reused: by row, how many transformer blocks took what they did not compute from the recording.
    moves: of tokens and tiles; None: the plain ways.
    """

    edits: list[RowActivations | None]
    cache: TokenCache
    spans: RowSpans
    prompts: list[PromptProjections]
    moves: Moves | None = None
    reused: list[int] = field(init=False)
    _packings: dict[tuple[int, int, tuple[bool, ...]], Packing] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.reused = [0] * len(self.edits)

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keeps only these rows, in this order. index: the same, int64 on their device."""
        Activations.select(self, rows, index)
        self.edits = [self.edits[row] for row in rows]
        self.reused = [self.reused[row] for row in rows]
        self.prompts = [self.prompts[row] for row in rows] if self.prompts else []
        self._packings.clear()

    def tokens_of(self, row: int) -> MaskTokens | None:
        """What is computed of a row; None where that is all of it."""
        edit = self.edits[row]
        if edit is None or edit.computed is None or edit.recorded is None:
            return None
        tokens = self.cache.of(edit.computed)
        return None if tokens.full else tokens

    def recorded(self, name: str) -> list[Tensor | None]:
        """By row, what was recorded under a name; None for a row that has to be computed in full without it."""
        return [
            edit.recorded.get(name) if edit and edit.recorded is not None and self.tokens_of(row) else None
            for row, edit in enumerate(self.edits)
        ]

    def put(self, name: str, outputs: Tensor) -> None:
        """Records outputs [rows, ...], of those rows that record."""
        for edit, output in zip(self.edits, outputs, strict=True):
            if edit is not None and edit.sink is not None:
                edit.sink.put(name, output)

    def count(self, reuses: Sequence[bool]) -> None:
        """A transformer block took these rows' other tokens from their recordings."""
        for row, reused in enumerate(reuses):
            self.reused[row] += reused

    def packing(self, size: tuple[int, int], masked: Sequence[bool]) -> Packing:
        """Of the computed tokens of masked rows, and of all tokens of the others. size: height and width in tokens."""
        height, width = size
        key = (height, width, tuple(masked))
        known = self._packings.get(key)
        if known is None:
            tokens = [self.tokens_of(row) if reads else None for row, reads in enumerate(masked)]
            sets = [None if each is None else each.at(height, width) for each in tokens]
            known = self._packings[key] = pack_rows(sets, height * width, self.hidden.device, self.moves)
        return known
