"""The recordings of frequent shapes, within a limit of memory. The least recently used one is dropped first."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

import torch

from bottega.device.memory_plan import MemoryPlan
from bottega.engine.acceleration.graphs.recorded import Key, RecordedForward
from bottega.errors import TooLarge

_log = logging.getLogger(__name__)

# Name of the reservation, which errors about missing memory mention.
_HOLDER = "graphs"
# Number of plain forward passes of a shape before it is recorded. Recording takes as long as several passes.
_USES = 2
# Number of shapes whose uses are counted; limited, because callers choose the shapes.
_MOST_COUNTED = 256


class RecordedForwards:
    """The recordings of a backbone.

    Args:
        budget_bytes: Upper bound on their device memory.
        most: Upper bound on their number.
        memory: The plan in which their memory is reserved.
        decoded_area: Returns how many elements of a latent of this area are decoded at once.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        most: int = 16,
        memory: MemoryPlan | None = None,
        decoded_area: Callable[[int], int] = lambda area: area,
    ) -> None:
        self._memory = memory or MemoryPlan()
        self._decoded_area = decoded_area
        self._budget_bytes = budget_bytes
        self._most = most
        self._recorded: OrderedDict[Key, RecordedForward] = OrderedDict()
        self._uses: Counter[Key] = Counter()
        self._refused: set[Key] = set()

    @property
    def used_bytes(self) -> int:
        """Device memory of all recordings."""
        return sum(forward.size_bytes for forward in self._recorded.values())

    def __len__(self) -> int:
        return len(self._recorded)

    def get(self, key: Key, make: Callable[[], RecordedForward]) -> RecordedForward | None:
        """Return the recording for a key, created with `make` if the key is frequent; None to run without one."""
        known = self._recorded.get(key)
        if known is not None:
            self._recorded.move_to_end(key)
            return known
        if key in self._refused or not self._often(key):
            return None
        try:
            made = make()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._refuse(key, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None
        if made.size_bytes > self._budget_bytes:
            self._refuse(key, f"it needs {made.size_bytes >> 20} MiB of {self._budget_bytes >> 20}")
            return None
        self._recorded[key] = made
        while len(self._recorded) > self._most or self.used_bytes > self._budget_bytes or not self._set_aside(key):
            self._recorded.popitem(last=False)
        if key not in self._recorded:
            self._refuse(key, f"it takes {made.size_bytes >> 20} MiB, and forward passes need the memory that is left")
            return None
        return made

    def clear(self) -> None:
        """Drop all recordings."""
        self._recorded.clear()
        self._memory.release(_HOLDER)
        self._uses.clear()
        self._refused.clear()

    def _set_aside(self, key: Key) -> bool:
        """Reserve memory. Return whether enough is left for forward passes and decodings of this shape."""
        rows, _, height, width = key[0]
        try:
            self._memory.reserve(_HOLDER, self.used_bytes)
        except TooLarge:
            return False
        area = height * width
        return not self._recorded or self._memory.leaves_room(area, rows, decoded_area=self._decoded_area(area))

    def _often(self, key: Key) -> bool:
        if len(self._uses) >= _MOST_COUNTED and key not in self._uses:
            self._uses.clear()
        self._uses[key] += 1
        return self._uses[key] > _USES

    def _refuse(self, key: Key, why: str) -> None:
        if len(self._refused) >= _MOST_COUNTED:
            self._refused.clear()
        self._refused.add(key)
        _log.warning("a shape cannot run as a graph", extra={"shape": str(key[0]), "why": why})
