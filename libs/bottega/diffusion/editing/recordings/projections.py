"""Keys and values that follow from a recorded step, in memory that nothing else needs.

Blocks attend to all tokens; what a recording has of those that are not computed is the blocks' output, from which keys
and values are projected in every edit anew. Kept, they save a third of what a masked block costs on a CPU, for four
times the bytes of what they follow from (twice as many tensors, of the model's element type).
"""

from __future__ import annotations

from bottega.diffusion.rows import Projections


class StepProjections:
    """KeptProjections of one step. room_bytes: what may still be added; whoever reads the step says it."""

    def __init__(self) -> None:
        self.room_bytes = 0
        self.size_bytes = 0
        self._kept: dict[str, Projections] = {}

    def get(self, name: str) -> Projections | None:
        return self._kept.get(name)

    def put(self, name: str, projections: Projections) -> None:
        before = self._kept.get(name)
        more_bytes = projections.size_bytes - (before.size_bytes if before is not None else 0)
        if more_bytes > self.room_bytes:
            return
        self._kept[name] = projections
        self.size_bytes += more_bytes
        self.room_bytes -= more_bytes
