"""Keys and values that follow from a recorded step, in memory that nothing else needs.

Blocks attend to all tokens; what a recording has of those that are not computed is the blocks' output, from which keys
and values are projected in every edit anew. Kept, they save a third of what a masked block costs on a CPU, for four
times the bytes of what they follow from (twice as many tensors, of the model's element type).
"""

from __future__ import annotations

from dataclasses import dataclass

from bottega.diffusion.rows import Projections


@dataclass(slots=True, kw_only=True, eq=False)
class ProjectionsRoom:
    """What may still be kept of all steps together; whoever has them says it anew before each turn."""

    left_bytes: int = 0


class StepProjections:
    """KeptProjections of one step. room: that all steps share."""

    def __init__(self, room: ProjectionsRoom) -> None:
        self.size_bytes = 0
        self._room = room
        self._kept: dict[str, Projections] = {}

    def get(self, name: str) -> Projections | None:
        return self._kept.get(name)

    def has_room(self, name: str, size_bytes: int) -> bool:
        return self._more_bytes(name, size_bytes) <= self._room.left_bytes

    def put(self, name: str, projections: Projections) -> None:
        more_bytes = self._more_bytes(name, projections.size_bytes)
        if more_bytes > self._room.left_bytes:
            return
        self._kept[name] = projections
        self.size_bytes += more_bytes
        self._room.left_bytes -= more_bytes

    def _more_bytes(self, name: str, size_bytes: int) -> int:
        before = self._kept.get(name)
        return size_bytes - (before.size_bytes if before is not None else 0)
